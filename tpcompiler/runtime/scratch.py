"""Hidden folders for temporary files; those of killed processes are removed."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

LONGEST = 100  # bytes of the target's name: a folder's name may have 255


@contextlib.contextmanager
def scratch_folder(directory: Path, name: str) -> Iterator[Path]:
    """Make a hidden folder in a directory for writing `name`; its remaining content is deleted afterwards.

    A lock that the kernel releases separates the folders of live processes from leftovers of killed ones, which are
    deleted here.

    Raises:
        OSError: the folder cannot be made.
    """
    remove_leftovers(directory)
    short = name.encode(errors="ignore")[:LONGEST].decode(errors="ignore")
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f".{short}.{_mark()}", dir=directory))
        lock = _lock(folder)
        if folder.is_dir():  # no other process mistook it for a leftover before it was locked
            break
        _release(lock)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        _release(lock)


def remove_leftovers(directory: Path) -> None:
    """Delete the folders that killed processes on this machine left in a directory."""
    leftover = re.compile(rf"\..*\.{_mark()}[a-z0-9_]{{8}}")
    with contextlib.suppress(OSError):
        for name in filter(leftover.fullmatch, os.listdir(directory)):
            if (lock := _lock(Path(directory) / name)) is not None:
                shutil.rmtree(Path(directory) / name, ignore_errors=True)
                _release(lock)


def _mark() -> str:
    """Return the machine's mark in folder names: locks of other machines may be invisible."""
    return f"tpcompiler-{hashlib.sha256(platform.node().encode()).hexdigest()[:6]}-"


def _lock(folder: Path) -> int | None:
    """Return an open descriptor that holds the folder's lock; None if another process has it, or without locks."""
    try:
        import fcntl

        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except (ImportError, OSError):
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _release(lock: int | None) -> None:
    if lock is not None:
        os.close(lock)
