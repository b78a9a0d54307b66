"""One rank: a program that draws, on ranks that are seeded alike and on ranks that are not."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

import tpcompiler


def main(artifact: Path, seed: int, out: Path) -> None:
    module = tpcompiler.load(artifact)
    rank, x = dist.get_rank(), torch.ones(3, 4)
    for how, own in (("alike", seed), ("otherwise", seed + rank)):
        torch.manual_seed(own)
        torch.save([value.clone() for value in module(x)], out / f"{how}.{rank}.out")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
