"""One rank: make the calls of a random program, and keep what each returns and writes to buffers."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

import tpcompiler
from tpcompiler._torch import tree_flatten

directory = Path(sys.argv[1])
module = tpcompiler.load(directory / "out")
rank = dist.get_rank()
calls, written = torch.load(directory / f"{rank}.calls")
answers = []
with torch.no_grad():
    for args in calls:
        outputs = [value.clone() for value in tree_flatten(module(*args))[0]]
        buffers = dict(module.named_buffers())
        answers.append((outputs, {name: buffers[name].clone() for name in written}))
torch.save(answers, directory / f"{rank}.answers")
