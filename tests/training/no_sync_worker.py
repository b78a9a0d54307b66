"""One rank: run all sequences of `tests/training/accumulating.py` on the artifacts of a directory."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

import tpcompiler
from tests.training.accumulating import run_all, take_turns

directory = Path(sys.argv[1])
batches = torch.load(directory / "batches")
for name in sys.argv[2:]:
    loaded = tpcompiler.load(directory / name, training=True)
    rank, world = dist.get_rank(), dist.get_world_size()
    samples = batches if name.startswith("tp") else batches.chunk(world, 1)[rank]
    made = take_turns(loaded["one"], loaded["two"], samples) if isinstance(loaded, dict) else run_all(loaded, samples)
    torch.save(made, directory / f"{name}.{rank}")
dist.destroy_process_group()
