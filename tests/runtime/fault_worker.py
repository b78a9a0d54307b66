"""One rank of a world in which something goes wrong: `fault_worker.py DIRECTORY FAULT SECONDS`, rank 1 is the culprit."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tpcompiler import load
from tpcompiler.errors import TpCompilerError


def main(directory: Path, fault: str, wait: timedelta) -> None:
    culprit = os.environ["RANK"] == ("0" if fault.endswith("first rank") else "1")
    if culprit and fault.startswith("dies before loading"):
        os._exit(7)
    if culprit and fault == "starts late":
        time.sleep(wait.total_seconds() / 2)
    if culprit and fault == "another artifact":
        directory = directory.with_name("another")
    if culprit and fault == "a damaged shard":
        directory = directory.with_name("damaged")
    if culprit and fault == "another world":
        os.environ["WORLD_SIZE"] = "3"
    compiled = (directory / "compiled.pt2").exists()
    module = load(directory, check_inputs=fault.startswith("inputs"), timeout=wait, compiled=compiled)
    if culprit and fault.startswith("dies before calling"):
        os._exit(7)
    if culprit and fault == "never calls":
        time.sleep(1.5 * wait.total_seconds())
    rows = 5 if culprit and fault == "inputs of another size" else 3
    x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(0))
    x = x.double() if culprit and fault == "inputs of another dtype" else x
    x = x + 1 if culprit and fault == "inputs of other content" else x
    print(f"called: {module(x).sum():.3f}", flush=True)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), sys.argv[2], timedelta(seconds=float(sys.argv[3])))
    except TpCompilerError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        os._exit(3)
