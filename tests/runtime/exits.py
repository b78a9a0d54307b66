"""Scripts that end in every way that users end theirs, each run by two gloo processes: how did they end?"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

import torch

from tests.launch import QUIET, ROOT, Ended
from tests.runtime.models import Block, randomised
from tpcompiler import parallelize

LIMIT = 180.0  # seconds for a world
ABORTED = "terminate called"
DESTROY = "torch.distributed.destroy_process_group()\n"

LOAD = """
import torch, tpcompiler

module = tpcompiler.load("out")
# the last call
module(torch.ones(3, 8))
"""
IN_THE_CALLERS_GROUP = LOAD.replace("\nmodule =", '\ntorch.distributed.init_process_group("gloo")\nmodule =', 1)
TORCH_ALONE = """
import os, torch

exported = torch.export.load(f"out/rank_{os.environ['RANK']}.pt2")
torch.distributed.init_process_group("gloo")
torch._C._distributed_c10d._register_process_group("tp=2:tp", torch.distributed.group.WORLD)
# the last call
exported.module()(torch.ones(3, 8))
"""
# As `load` did it before: the program's collectives run in the default group, and what torch.export.load imports is imported
# after that is made.
UNMENDED = """
import os, torch

torch.distributed.init_process_group("gloo")
import torch.distributed.nn.functional
torch._C._distributed_c10d._register_process_group("tp=2:tp", torch.distributed.group.WORLD)
exported = torch.export.load(f"out/rank_{os.environ['RANK']}.pt2")
# the last call
exported.module()(torch.ones(3, 8))
"""
# One core for each rank, on which gloo's threads run only when the rank has nothing to do.
IDLE = """
import os, pathlib
cores = sorted(os.sched_getaffinity(0))
core = cores[int(os.environ["RANK"]) % len(cores)]
for thread in pathlib.Path("/proc/self/task").iterdir():
    os.sched_setaffinity(int(thread.name), {core})
    if "gloo" in (thread / "comm").read_text():
        os.sched_setscheduler(int(thread.name), os.SCHED_IDLE, os.sched_param(0))
"""

# Runs scripts in forks of a process that has imported torch, which takes most of a script's time; `gc.freeze` spares the forks
# the most of what is left. The one module whose time of import matters (see `release_default_group`) is left to the script.
TEMPLATE = """
import gc, json, os, sys
import torch, torch._export.serde.serialize
exec(sys.argv[1])
del sys.modules["torch.distributed.nn.functional"]
assert len(os.listdir("/proc/self/task")) == 1, "a fork has one thread"
gc.collect(), gc.freeze()
print(json.dumps(None), flush=True)
world = True
while world and (order := sys.stdin.readline()):
    order, world = json.loads(order), []
    for rank, log in enumerate(order["logs"]):
        if not (child := os.fork()):
            log = os.open(log, os.O_WRONLY | os.O_CREAT)
            os.dup2(log, 1), os.dup2(log, 2)
            os.environ.update(order["environment"], RANK=str(rank), LOCAL_RANK=str(rank))
            script, world = order["script"], []
            break
        world.append(child)
    if world:
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in world]
        print(json.dumps(codes), flush=True)
    else:
        exec(script)
"""


def write_artifact(directory: Path) -> None:
    """Write `out`, which the scripts load."""
    program = torch.export.export(randomised(Block()), (torch.randn(3, 8),))
    parallelize(program, 2, {"up": "colwise", "down": "rowwise"}).save(directory / "out")


def never_switch(script: str) -> str:
    """The script with 1000 s between two threads' turns: gloo's do not come to theirs before the interpreter's end."""
    return f"import sys\nsys.setswitchinterval(1000)\n{script}"


def idle_gloo(script: str) -> str:
    """The script with gloo's threads at the lowest priority from the last call on."""
    return script.replace("# the last call", IDLE.strip())


def run_script(directory: Path, script: str) -> Ended:
    """Run the script in two fresh interpreters, which nothing ends when the other does.

    Raises:
        AssertionError: a rank that is still there after the limit.
    """
    environment, began = _environment(), time.monotonic()
    with contextlib.ExitStack() as stack:
        logs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2)]
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", script],
                cwd=directory,
                env={**os.environ, **environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            for rank, log in enumerate(logs)
        ]
        try:
            for process in ranks:
                process.wait(max(began + LIMIT - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            raise AssertionError(f"a rank is still there after {LIMIT:g} s") from None
        finally:
            for process in ranks:
                _kill(process)
        for log in logs:
            log.seek(0)
        printed = tuple(log.read() for log in logs)
        return Ended(tuple(process.returncode for process in ranks), printed, time.monotonic() - began)


class Template:
    """A process that has imported torch, and runs scripts in forks of itself, two at a time."""

    def __init__(self, directory: Path, imports: str) -> None:
        self._directory, self._imports = directory, imports
        self._start()

    def __enter__(self) -> Template:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        _kill(self._process)

    def run(self, script: str) -> Ended:
        """As `run_script` does."""
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            logs = [Path(folder) / str(rank) for rank in range(2)]
            order = {"script": script, "logs": [*map(str, logs)], "environment": _environment()}
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            try:
                codes = self._answer()
            except AssertionError:
                _kill(self._process)
                self._start()
                raise
            return Ended(tuple(codes), tuple(log.read_text() for log in logs), time.monotonic() - began)

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", TEMPLATE, self._imports],
            cwd=self._directory,
            env={**os.environ, **_environment()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._answer()

    def _answer(self) -> list[int]:
        out = self._process.stdout
        assert out is not None
        if not select.select([out], [], [], LIMIT)[0]:
            raise AssertionError(f"a rank is still there after {LIMIT:g} s")
        answer: list[int] = json.loads(out.readline())
        return answer


def _environment() -> dict[str, str]:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        meet = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(found.getsockname()[1]), "WORLD_SIZE": "2"}
    return {**QUIET, **meet, "PYTHONPATH": str(ROOT)}


def _kill(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
    """End the process and what it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def ended_badly(ended: Ended) -> bool:
    return any(ended.codes) or any(ABORTED in text for text in ended.printed)
