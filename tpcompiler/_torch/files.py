"""Read and write program files with torch's own readers and writers."""

from __future__ import annotations

import contextlib
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.export import ExportedProgram
from torch.utils import _pytree

from tpcompiler._torch.quick_files import quick_files
from tpcompiler.errors import ArtifactError, reason


def record_reader(file: IO[bytes] | io.RawIOBase) -> Any:
    """Return torch's own archive reader, which may disagree with `zipfile` about the content."""
    file.seek(0)  # it takes the current position for the beginning
    return vars(torch._C)["PyTorchFileReader"](file)


def is_registered_class(name: str) -> bool:
    """Return True if a program's file may name this class in its tree of inputs or outputs."""
    return name in vars(_pytree)["SERIALIZED_TYPE_TO_PYTHON_TYPE"]


class _Stream(io.RawIOBase):
    """A stream that passes the data of torch's archive writer to a file, and stores the file's first error."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__()
        self._file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        if self.error is None:
            try:
                self._file.write(data)
            except OSError as error:
                self.error = error
        return len(data)

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:  # torch asks, and seeks to the beginning at the end
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return offset


@contextlib.contextmanager
def archive_stream(path: Path) -> Iterator[io.RawIOBase]:
    """Open a file for torch's archive writer, which ends the process if a write fails, as on a full disk.

    The folder in the archive is called `archive`, independent of the file's name.

    Raises:
        OSError: the file cannot be written.
    """
    with path.open("wb") as file:
        stream = _Stream(file)
        yield stream
        if stream.error is not None:
            raise stream.error


def save_program(program: ExportedProgram, file: Any, **more: Any) -> None:
    """Save as `torch.export.save` does, but faster."""
    with quick_files():
        torch.export.save(program, file, **more)


class _Mapped:
    """torch's archive reader, with stored tensors mapped into memory instead of read."""

    def __init__(self, reader: Any, path: Path, size: int) -> None:
        self._reader = reader
        self._file = torch.UntypedStorage.from_file(str(path), False, size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    def get_storage_from_record(self, name: str, count: int, dtype: torch.dtype) -> torch.Tensor:
        start = self._reader.get_record_offset(name)
        storage = cast(torch.UntypedStorage, self._file[start : start + count * dtype.itemsize])
        return torch.empty(0, dtype=torch.uint8).set_(storage)


def read_archive_state(path: Path, file: IO[bytes] | io.RawIOBase | None = None) -> dict[str, torch.Tensor]:
    """Return the parameters, buffers and constants in a .pt2 by name, without the program (torch 2.11 and 2.13).

    They are mapped from `path` and take no memory until used, except those in a pickle, which are unpickled: inspect
    the file first, and pass it open as `file`.

    Raises:
        ArtifactError: an entry that is missing or damaged.
    """
    from torch.export.pt2_archive import _package

    tensors: dict[str, torch.Tensor] = {}
    try:
        with contextlib.nullcontext(file) if file is not None else path.open("rb") as opened:
            opened.seek(0)
            reader: Any = _package.PT2ArchiveReader(cast(Any, opened))
            with zipfile.ZipFile(cast(Any, opened)) as archive:
                if all(entry.compress_type == zipfile.ZIP_STORED for entry in archive.infolist()):
                    reader.archive_file = _Mapped(reader.archive_file, path, opened.seek(0, io.SEEK_END))
            for read in (_package._load_constants, _package._load_state_dict):
                section = read(reader, "model")
                assert isinstance(section, dict)
                if both := sorted(tensors.keys() & section.keys()):
                    raise ValueError(f"{both[0]!r} is in the state and in the constants")
                tensors.update(section)
    except Exception as error:  # torch raises any error of the layer that fails
        line = reason(error)
        raise ArtifactError(
            f"the tensors of {path} cannot be read: {line}", help="copy the artifact again, or convert the model again"
        ) from error
    return tensors
