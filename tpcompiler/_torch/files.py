"""Read and write program files with torch's own readers and writers."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.export import ExportedProgram
from torch.utils import _pytree

from tpcompiler._torch.quick_files import quick_files


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


def save_program(program: ExportedProgram, file: Any, *, text: bytes = b"", **more: Any) -> None:
    """Save as `torch.export.save` does, but faster; `text`: the JSON of an equal graph, which is not written again."""
    with quick_files(text):
        torch.export.save(program, file, **more)


def build_tensor(name: str, data: dict[str, Any], storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a stored tensor over its memory, as a .pt2's JSON describes it.

    Raises:
        LookupError, TypeError, ValueError, RuntimeError: it is not a description, or the memory does not fit it.
    """
    from torch._export.serde import serialize

    sizes, strides = ([each["as_int"] for each in data[part]] for part in ("sizes", "strides"))
    dtype: torch.dtype = vars(serialize)["_SERIALIZE_TO_TORCH_DTYPE"][data["dtype"]]
    kind, index = data["device"]["type"], data["device"]["index"]
    device = torch.device(kind) if index is None else torch.device(kind, index)
    offset, held = data["storage_offset"]["as_int"], storage.nbytes()
    if held % dtype.itemsize or (not held and 0 not in sizes):
        raise ValueError(f"{name!r} is {sizes} of {dtype}, but it holds {held:,} bytes")
    value = torch.empty(sizes if not held else 0, dtype=dtype)
    if held:
        value = value.set_(cast(Any, storage), offset, sizes, strides)
    return value.to(device).requires_grad_(data["requires_grad"])


def build_program(
    data: dict[str, Any], state: dict[str, torch.Tensor], constants: dict[str, torch.Tensor], examples: Any
) -> ExportedProgram:
    """Build a program from the JSON of a .pt2, its tensors and its example inputs: nothing else is read.

    Raises:
        Exception: of any type, from the part of torch's deserializer that fails.
    """
    from torch._export.serde import schema, serialize

    program = vars(serialize)["_dict_to_dataclass"](schema.ExportedProgram, data)
    reader = serialize.ExportedProgramDeserializer(None)
    made = reader.deserialize(program, cast(Any, state), cast(Any, constants))
    made._example_inputs = examples  # which torch would look through for modules, as often as they repeat
    return made
