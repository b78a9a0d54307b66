"""Load an artifact without weights from a checkpoint, and call it once."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

import tpcompiler

directory = Path(sys.argv[1])
module = tpcompiler.load(directory / "out", checkpoint=directory / "c")
torch.save(module(*torch.load(directory / "args")), directory / f"{dist.get_rank()}.result")
