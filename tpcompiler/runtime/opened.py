"""A file opened once: the bytes that were hashed are the bytes that are read, even if its path changes meanwhile."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from tpcompiler.errors import ArtifactError
from tpcompiler.terminal.progress import measured

INHERITED = (Path("/dev/fd"), Path("/proc/self/fd"))


class Opened(io.FileIO):
    """A regular file, open for reading.

    Attributes:
        path: the path it was opened at, for messages; nothing is read from there again.

    Raises:
        OSError: the file is missing, unreadable, or not regular: reading a pipe would wait for a writer.
    """

    read = io.RawIOBase.read  # type: ignore[assignment]  # this and the next call `readinto`
    readall = io.RawIOBase.readall

    def __init__(self, path: Path) -> None:
        flags = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        super().__init__(path, opener=lambda name, own: os.open(name, own | flags))
        self.path, self._read = path, 0
        self._report: Callable[[int], None] | None = None
        self._known = self._state()
        self.size = os.fstat(self.fileno()).st_size
        if not stat.S_ISREG(os.fstat(self.fileno()).st_mode):
            self.close()
            raise OSError(errno.EINVAL, "it is a pipe or a device", os.fspath(path))

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """Report in the block how many bytes have been read."""
        with measured(f"reading {self.path}", "bytes", self.size) as self._report:
            try:
                yield
            finally:
                self._report = None

    def refuse_change(self) -> None:
        """Raise ArtifactError if the file, or the target of its path, has changed since it was opened."""
        try:
            there = os.stat(self.path)
            same = (there.st_dev, there.st_ino) == self._known[:2]
        except OSError:
            same = False
        if not same or self._state() != self._known:
            raise ArtifactError(f"{self.path} was changed while it was read", help="read it again when it is whole")

    def sha256(self) -> str:
        digest = hashlib.sha256()
        self.seek(0)
        with measured(f"hashing {self.path.name}", "bytes", self.size) as report:
            while piece := self.read(1 << 20):
                digest.update(piece)
                report(self.tell())
        self.seek(0)
        return digest.hexdigest()

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        count = super().readinto(buffer)
        if self._report is not None:
            self._read += count
            self._report(min(self._read, self.size - 1))  # bytes that are read twice count twice, until the last one
        return count

    def _state(self) -> tuple[int, ...]:
        status = os.fstat(self.fileno())
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_nlink


def open_input(path: Path) -> io.RawIOBase | BinaryIO:
    """Open a file, or a pipe given to this process such as the shell's `<(command)`, to be read once.

    Raises:
        OSError: as `Opened`.
    """
    inherited = path.parent in INHERITED or path == Path("/dev/stdin")
    return path.open("rb") if inherited else Opened(path)


def read_text(path: Path) -> str:
    """Read a whole small text file.

    Raises:
        OSError, UnicodeDecodeError: as `Opened`; it is not UTF-8.
    """
    with open_input(path) as file:
        return (file.read() or b"").decode("utf-8")


def read_object(path: Path) -> dict[str, Any]:
    """Read a small JSON file with an object.

    Raises:
        OSError, ValueError: as `read_text`; it is not JSON, or not an object.
    """
    try:
        data = json.loads(read_text(path))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(data, dict):
        raise ValueError(f"it is a {type(data).__name__}, not an object")
    return data
