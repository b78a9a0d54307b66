"""Start real gloo processes with torchrun, one thread each, under a hard time limit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent


def torchrun(world: int, *arguments: str | Path, timeout: int = 180) -> subprocess.CompletedProcess[str]:
    """Run `python -m torch.distributed.run ... arguments`; on time-out the whole process group is ended."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    process = subprocess.Popen(
        [*launch, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output, _ = process.communicate()
        raise AssertionError(f"no end within {timeout} s:\n{output}") from None
    return subprocess.CompletedProcess(launch, process.returncode, output, "")


def called(calls: Sequence[Sequence[tuple[Any, ...]]], directory: Path) -> list[list[Any]]:
    """What every rank gets from its own calls of the artifact in `directory / "out"`, in real gloo processes."""
    for rank, own in enumerate(calls):
        torch.save(list(own), directory / f"{rank}.calls")
    done = torchrun(len(calls), Path(__file__).parent / "call_worker.py", directory)
    assert done.returncode == 0, done.stdout
    return [torch.load(directory / f"{rank}.results") for rank in range(len(calls))]
