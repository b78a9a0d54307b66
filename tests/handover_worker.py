"""One rank of one side of a handover: make the calls, hand the caches over, make the other side's calls.

Arguments: the side, the artifact, the handover, the address, and where calls are read and results written.
"""

import sys
from datetime import timedelta
from pathlib import Path

import torch

import tpcompiler

side, artifact, handover, address, directory = sys.argv[1:]
module = tpcompiler.load(artifact, timeout=timedelta(seconds=60))
rank = torch.distributed.get_rank()
link = tpcompiler.join_handover(handover, side, address, timeout=timedelta(seconds=60))
calls, results = torch.load(Path(directory) / f"{side}.calls"), []
with torch.no_grad():
    moved = link.transfer(module) if side == "target" else 0
    results = [module(*args).clone() for args in calls]
    moved += link.transfer(module) if side == "source" else 0
buffers = {name: value.clone() for name, value in module.named_buffers()}
torch.save((moved, results, buffers), Path(directory) / f"{side}_{rank}.results")
