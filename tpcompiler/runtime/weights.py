"""The weights of one rank as a safetensors file: written tensor by tensor, mapped into memory when read."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from tpcompiler.errors import ArtifactError, UnsupportedError
from tpcompiler.runtime.opened import Opened

# The format's names: https://github.com/huggingface/safetensors
NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
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
PIECE = 1 << 26  # bytes that are hashed and written at once


class Entry(NamedTuple):
    """A tensor of a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def lay_out(entries: Iterable[Entry]) -> list[Entry]:
    """Entries in the order in which they lie in a file: wide dtypes first, so that each is aligned to its own.

    Raises:
        UnsupportedError: a dtype that the format does not have.
    """
    found = sorted(entries, key=lambda entry: (-entry.dtype.itemsize, entry.name))
    for entry in found:
        if entry.dtype not in NAMES:
            raise UnsupportedError(
                f"'{entry.name}' is of {entry.dtype}, which a safetensors file cannot hold",
                help='write self-contained files: layout="ranks" (--layout ranks)',
            )
    return found


def write_weights(path: Path, entries: Sequence[Entry], values: Iterable[torch.Tensor]) -> str:
    """Write a file with `entries`, as `lay_out` gives them, and their values, one at a time. Returns its SHA-256.

    Raises:
        OSError: it cannot be written.
    """
    header, at = {}, 0
    for entry in entries:
        offsets = [at, at + entry.nbytes]
        header[entry.name] = {"dtype": NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": offsets}
        at += entry.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for piece in (len(text).to_bytes(8, "little"), text):
            digest.update(piece)
            file.write(piece)
        for entry, value in zip(entries, values, strict=True):
            assert (value.dtype, tuple(value.shape)) == (entry.dtype, entry.shape), entry.name
            data = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
            for start in range(0, len(data), PIECE):
                digest.update(data[start : start + PIECE])
                file.write(data[start : start + PIECE])
    return digest.hexdigest()


def read_weights(file: Opened, wanted: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All tensors of a file, mapped: read when they are used, private to this process when they are written to.

    Args:
        wanted: name -> a (fake) tensor of the dtype, shape and strides that it must have.

    Raises:
        ArtifactError: it is no safetensors file, or has other tensors than these.
    """
    again = "cut the weights again, or copy the artifact again"
    try:
        with safe_open(file.path, "pt") as opened:
            if differ := sorted(set(opened.keys()) ^ wanted.keys()):
                lacks = "has no tensor" if differ[0] in wanted else "holds the tensor"
                but = "which its program takes" if differ[0] in wanted else "which its program does not take"
                raise ArtifactError(f"{file.path} {lacks} {differ[0]!r}, {but}", help=again)
            found = {name: opened.get_tensor(name) for name in wanted}
    except (SafetensorError, OSError, ValueError) as error:
        raise ArtifactError(f"{file.path} cannot be read: {error}", help=again) from error
    file.refuse_change()
    for name, want in wanted.items():
        value = found[name]
        if (value.dtype, value.shape) != (want.dtype, want.shape):
            raise ArtifactError(
                f"{file.path}: {name!r} is {value.dtype} {list(value.shape)}, its program takes {want.dtype} "
                f"{list(want.shape)}",
                help=again,
            )
        if value.stride() != want.stride():  # a weight whose dims lie in another order: the file has them in theirs
            found[name] = torch.empty_strided(want.shape, want.stride(), dtype=want.dtype).copy_(value)
    return found
