"""One rank: load the artifact, make this rank's calls in order, write every result.

Of an artifact of several programs the first argument of a call names the program.
"""

import sys
from pathlib import Path

import torch

import tpcompiler
from tpcompiler._torch import tree_map

directory = Path(sys.argv[1])
module = tpcompiler.load(directory / "out")
rank = torch.distributed.get_rank()
results = []
with torch.no_grad():
    for args in torch.load(directory / f"{rank}.calls"):
        made = module[args[0]](*args[1:]) if isinstance(module, dict) else module(*args)
        results.append(tree_map(lambda v: v.clone() if isinstance(v, torch.Tensor) else v, made))
torch.save(results, directory / f"{rank}.results")
