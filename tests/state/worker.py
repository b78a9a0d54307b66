"""One rank: load the artifact, make all calls in order, write every output."""

import sys
from pathlib import Path

import torch

import tpcompiler
from tpcompiler.runtime.load import exit_together

directory = Path(sys.argv[1])
module = tpcompiler.load(directory / "out")
with torch.no_grad():
    outputs = [module(*args).clone() for args in torch.load(directory / "calls.pt")]
torch.save(outputs, directory / f"{torch.distributed.get_rank()}.out")
exit_together()
