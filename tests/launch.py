"""Start real gloo processes, one thread each, under a hard time limit.

`torchrun` starts them as users do: each is an interpreter that imports torch, which takes longer than most of what
they are started for. `fork_ranks` forks them from one process that has imported torch, so that only the ways to
start need the other.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

ROOT = Path(__file__).parent.parent
QUIET = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL", "PYTHONWARNINGS": "ignore"}
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "torch.distributed.tensor",
        "torch._export.serde.serialize",
        "tpcompiler.api.parallel_program",
        "tpcompiler.checkpoint.load",
    ]
)


@dataclass(frozen=True)
class Ended:
    """How the ranks of a world ended: their exit codes, what they printed, and how long the slowest took.

    `shown` is the text that torchrun would show for the ranks that failed, made by torch from the same files.
    """

    codes: tuple[int, ...]
    printed: tuple[str, ...]
    seconds: float
    shown: str = ""


def fork_ranks(world: int, script: Path, *arguments: str | Path, timeout: float = 180, together: bool = True) -> Ended:
    """Run the script once per rank, each with what torchrun sets; if `together`, all are ended when one fails.

    The store through which the ranks meet is this process's, as torchrun's is its own: it outlives them.

    Raises:
        AssertionError: a rank that is still there after `timeout` seconds.
    """
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    meet = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(world)}
    meet |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0", "LOCAL_WORLD_SIZE": str(world)}
    ranks, began = [], time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / str(rank) for rank in range(world)]
        try:
            for rank, log in enumerate(logs):
                own = {**os.environ, **QUIET, **meet, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                own["TORCHELASTIC_ERROR_FILE"] = f"{log}.error"
                ranks.append(
                    FORKS.Process(
                        target=_become,
                        args=(script, [*map(str, arguments)], own, log, log, timeout, Path.cwd()),
                        daemon=True,
                    )
                )
                ranks[-1].start()
            left = {process.sentinel for process in ranks}
            while left and not (together and any(process.exitcode for process in ranks)):
                ended = wait(left, began + timeout - time.monotonic())
                assert ended, f"no end within {timeout:g} s: {[log.read_text() for log in logs]}"
                left.difference_update(ended)
            failed = [at for at, process in enumerate(ranks) if process.exitcode]  # the others are ended for it
        finally:
            for process in ranks:
                process.kill()
                process.join()
        codes = tuple(process.exitcode or 0 for process in ranks)
        failures = {at: ProcessFailure(at, 0, codes[at], f"{logs[at]}.error") for at in failed}
        shown = str(ChildFailedError(script.name, failures)) if failures else ""
        return Ended(codes, tuple(log.read_text() for log in logs), time.monotonic() - began, shown)


def fork_code(
    code: str, *arguments: str | Path, cwd: Path | None = None, timeout: float = 180
) -> subprocess.CompletedProcess[str]:
    """Run the code as a script of its own, in a fork of a process that has imported torch and tpcompiler.

    Raises:
        AssertionError: it is still there after `timeout` seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        script, out, err = (Path(folder) / name for name in ("script.py", "out", "err"))
        script.write_text(code, encoding="utf-8")
        words = [*map(str, arguments)]
        own = {**os.environ, **QUIET}
        process = FORKS.Process(target=_become, args=(script, words, own, out, err, timeout, cwd or ROOT))
        process.start()
        process.join(timeout)
        late = process.exitcode is None
        process.kill()
        process.join()
        assert not late, f"no end within {timeout:g} s: {err.read_text()}"
        return subprocess.CompletedProcess(words, process.exitcode or 0, out.read_text(), err.read_text())


def run_ranks(world: int, script: Path, *arguments: str | Path, timeout: float = 180) -> None:
    """Run the script once per rank, all of which must end well."""
    ended = fork_ranks(world, script, *arguments, timeout=timeout)
    assert not any(ended.codes), "\n".join(ended.printed)


def fork_launched(words: Sequence[str], timeout: float = 180) -> Ended:
    """Fork what torchrun would start, given these words: a script, or a module."""
    asked = run.parse_args(words)
    script = asked.training_script
    if asked.module:
        spec = find_spec(script)
        if spec is not None and spec.submodule_search_locations:
            spec = find_spec(f"{script}.__main__")
        assert spec is not None
        script = spec.origin
    return fork_ranks(int(asked.nproc_per_node), Path(script), *asked.training_script_args, timeout=timeout)


def fork_judged(command: Sequence[str], threads: int, timeout: timedelta, **_: object) -> None:
    """Stands in for `tpcompiler.judge.compare.processes.run_ranks`, where the ranks must end well."""
    assert threads == 1
    ended = fork_launched(command[3:], timeout.total_seconds())
    assert not any(ended.codes), ended.printed


def _become(
    script: Path, arguments: list[str], environment: dict[str, str], out: Path, err: Path, timeout: float, cwd: Path
) -> None:
    """Of a fork: become the script's interpreter, which prints where it is before its time is over."""
    for stream, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    faulthandler.dump_traceback_later(0.9 * timeout, file=2)
    os.environ.clear()  # the server has that of the test which started it
    os.environ.update(environment)
    os.chdir(cwd)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    sys.argv = [str(script), *arguments]
    runpy.run_path(str(script), run_name="__main__")


def torchrun(world: int, *arguments: str | Path, timeout: int = 180) -> subprocess.CompletedProcess[str]:
    """Run `python -m torch.distributed.run ... arguments`; on time-out the whole process group is ended."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    environment = {**os.environ, **QUIET}
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
    run_ranks(len(calls), Path(__file__).parent / "call_worker.py", directory)
    return [torch.load(directory / f"{rank}.results") for rank in range(len(calls))]
