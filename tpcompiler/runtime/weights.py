"""A rank's weights as a safetensors file: written tensor by tensor, mapped into memory when read."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from tpcompiler.errors import ArtifactError, UnsupportedError, explaining, option
from tpcompiler.runtime.opened import Opened
from tpcompiler.runtime.records import DTYPES

# The format's names: https://github.com/huggingface/safetensors
NAMES = {
    **{getattr(torch, name): short.upper() for name, short in DTYPES.items()},
    torch.bool: "BOOL",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}
WRITE_AGAIN = "copy the artifact again, or convert the model again"
AGAIN = "cut the weights again, or copy the artifact again"
PIECE = 1 << 26  # bytes that are hashed and written at once


def dtype_of(text: str) -> torch.dtype:
    """Return the dtype for a manifest's text."""
    names = {short: name for name, short in DTYPES.items()}
    dtype: torch.dtype = getattr(torch, names.get(text, text.removeprefix("torch.")))
    return dtype


class TensorEntry(NamedTuple):
    """A tensor of a file or a program; `aliases` are its tied names.

    `is_buffer`: a persistent buffer. `is_optional`: a source may lack it.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    aliases: tuple[str, ...] = ()
    is_buffer: bool = False
    is_optional: bool = False

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def lay_out(entries: Iterable[TensorEntry]) -> list[TensorEntry]:
    """Sort entries into the order of a file: wide dtypes first, which aligns each tensor to its dtype.

    Raises:
        UnsupportedError: the format lacks a dtype.
    """
    ordered = sorted(entries, key=lambda entry: (-entry.dtype.itemsize, entry.name))
    for entry in ordered:
        if entry.dtype not in NAMES:
            raise UnsupportedError(
                f"'{entry.name}' is of {entry.dtype}, which a safetensors file cannot hold",
                help="write self-contained files: " + option("--layout ranks", 'layout="ranks"'),
            )
    return ordered


class OtherContent(Exception):
    """A continued file contains another tensor than the one to write."""


class Writing:
    """A file that is written tensor by tensor, in the order of its entries (`lay_out`).

    Attributes:
        count: number of tensors that were written, or compared with those of an interrupted run.
        kept: bytes of tensors that the interrupted run left.
    """

    def __init__(self, path: Path, entries: Sequence[TensorEntry], *, go_on: bool = False) -> None:
        """Open the file; `go_on` keeps the whole tensors that an interrupted run left in it.

        Raises:
            OSError: the file cannot be written.
        """
        self.entries, self.count, self.kept, whole = entries, 0, 0, 0
        head = _header(entries)
        self._hash = hashlib.sha256(head)
        self._writer = ThreadPoolExecutor(1)  # writes a piece while it is hashed, which takes as long
        self._file = path.open("r+b" if go_on and path.is_file() else "w+b")
        if self._file.read(len(head)) == head:
            there = path.stat().st_size - len(head)
            while whole < len(entries) and self.kept + entries[whole].nbytes <= there:
                self.kept += entries[whole].nbytes
                whole += 1
        else:
            self._file.seek(0)
            self._file.write(head)
        self._whole = whole
        self._file.truncate(len(head) + self.kept)

    def put(self, value: torch.Tensor) -> int:
        """Write the next tensor, or compare it with the one in the file; return the number of bytes written.

        Raises:
            OtherContent: the file contains another tensor.
        """
        entry = self.entries[self.count]
        assert (value.dtype, tuple(value.shape)) == (entry.dtype, entry.shape), entry.name
        data = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
        is_there = self.count < self._whole
        for start in range(0, len(data), PIECE):
            piece = data[start : start + PIECE]
            written = self._writer.submit(self._compare if is_there else self._file.write, piece)
            self._hash.update(piece)
            written.result()
        self.count += 1
        return 0 if is_there else entry.nbytes

    def _compare(self, piece: memoryview) -> None:
        if self._file.read(len(piece)) != piece:
            raise OtherContent(self.entries[self.count].name)

    def finish(self) -> str:
        assert self.count == len(self.entries)
        self._file.flush()
        return self._hash.hexdigest()

    def __enter__(self) -> Writing:
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.shutdown()
        self._file.close()


def write_weights(path: Path, entries: Sequence[TensorEntry], values: Iterable[torch.Tensor]) -> str:
    """Write a whole file, its values one at a time; return its SHA-256.

    Raises:
        OSError: the file cannot be written.
    """
    with Writing(path, entries) as writing:
        for value in values:
            writing.put(value)
        return writing.finish()


def _header(entries: Sequence[TensorEntry]) -> bytes:
    rows, at = {}, 0
    for entry in entries:
        offsets = [at, at + entry.nbytes]
        rows[entry.name] = {"dtype": NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": offsets}
        at += entry.nbytes
    text = json.dumps(rows, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_all(file: Opened) -> dict[str, torch.Tensor]:
    """Map all tensors of a file: read at first use, private to this process when written to.

    Raises:
        ArtifactError: it is not a safetensors file.
    """
    with (
        explaining(f"{file.path} cannot be read", AGAIN, SafetensorError, OSError, ValueError),
        safe_open(file.path, "pt") as opened,
    ):
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  (it is no mapping)
    file.refuse_change()
    return tensors


def refuse_unlike(path: Path, tensors: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    """Raise ArtifactError if the tensors of a file are not those that a program takes: names, dtypes, shapes."""
    if differ := sorted(tensors.keys() ^ wanted.keys()):
        lacks = "has no tensor" if differ[0] in wanted else "holds the tensor"
        but = "which its program takes" if differ[0] in wanted else "which its program does not take"
        raise ArtifactError(f"{path} {lacks} {differ[0]!r}, {but}", help=WRITE_AGAIN)
    for name, want in wanted.items():
        value = tensors[name]
        if (value.dtype, value.shape) != (want.dtype, want.shape):
            raise ArtifactError(
                f"{path}: {name!r} is {value.dtype} {list(value.shape)}, its program takes {want.dtype} "
                f"{list(want.shape)}",
                help=WRITE_AGAIN,
            )


def laid_out(value: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Return the tensor with the strides of `want`, whose dims may be in another order, or expanded."""
    if value.stride() == want.stride():
        return value
    own = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in want.stride())
    shape = [1 if stride == 0 else size for size, stride in zip(want.shape, want.stride(), strict=True)]
    return torch.empty_strided(shape, want.stride(), dtype=want.dtype).copy_(value[own]).expand(want.shape)
