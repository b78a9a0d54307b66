"""A save that is killed, or runs out of room, at any moment: the old artifact is there, or the new one, or none."""

from __future__ import annotations

import os
import random
import resource
import signal
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from tests.runtime.test_artifact import manifest
from tests.runtime.written import write_artifact
from tpcompiler.errors import ArtifactError
from tpcompiler.runtime.artifact import SINGLE, read_manifest
from tpcompiler.runtime.program_files import ProgramFiles

RANKS, MIB = 4, 1 << 20
NO_ROOM = 9


def save(directory: Path, filling: bytes) -> None:
    """Six files of 2 MiB each: the model, a program, and what four ranks hold."""
    groups = {f"tp={RANKS}:tp": [list(range(RANKS))]}
    several = manifest(mesh={"tp": RANKS}, groups=groups, plan={"w": filling.hex()})
    write_artifact(directory, several, lambda rank, path: path.write_bytes(filling * 2 * MIB) and None, force=True)


def found(directory: Path) -> str:
    """The filling that is there, in whole and with its manifest, or "none".

    Raises:
        ArtifactError: something in between.
    """
    if not directory.exists():
        return "none"
    read = read_manifest(directory)
    files = ProgramFiles(SINGLE, directory, read)
    contents = {files.open(name).path.read_bytes()[:1].hex() for name in read.files}
    assert contents == {read.plan["w"]}
    return str(read.plan["w"])


def _line_by_line(work: Callable[[], None], before: Callable[[int], None]) -> None:
    """Tell the number of each line of Python before it runs."""
    number = count()

    def trace(frame: object, event: str, arg: object) -> Any:
        if event == "line":
            before(next(number))
        return trace

    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(None)


def forked(work: Callable[[], None], kill_at: int | None = None) -> int:
    """Run in a process of its own, which ends before this line of Python: its exit code, or minus the signal."""
    child = os.fork()
    if child == 0:
        try:
            if kill_at is None:
                work()
            else:
                _line_by_line(work, lambda line: os.kill(os.getpid(), signal.SIGKILL) if line == kill_at else None)
            os._exit(0)
        except ArtifactError:
            os._exit(NO_ROOM)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_saves(directory: Path, times: int, seed: int) -> dict[str, int]:
    """Replace an artifact so many times, each killed at a line drawn by chance: how often each state was found then."""
    drawn, states, lines = random.Random(seed), {"old": 0, "new": 0, "none": 0}, []
    save(directory / "out", b"a")
    _line_by_line(lambda: save(directory / "out", b"a"), lines.append)
    for number in range(times):
        old, new = ("61", "62") if number % 2 == 0 else ("62", "61")
        save(directory / "out", bytes.fromhex(old))
        ended = forked(lambda new=new: save(directory / "out", bytes.fromhex(new)), drawn.choice(lines))  # type: ignore[misc]
        assert ended == -signal.SIGKILL
        state = found(directory / "out")
        states["old" if state == old else "new" if state == new else state] += 1
    return states


def save_without_room(directory: Path) -> int:
    """Save where no file may grow over 1 MiB: the exit code."""

    def work() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, MIB))
        save(directory / "out", b"b")

    return forked(work)
