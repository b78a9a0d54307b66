"""Cut the inputs of a program in stages into micro-batches, and join their outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from tpcompiler.errors import InputsError
from tpcompiler.runtime.records import BoundaryRecord, StageRecord
from tpcompiler.runtime.weights import dtype_of

Tensors = Mapping[str, torch.Tensor]


def refuse_batches(record: StageRecord, count: int) -> None:
    """Refuse micro-batches of a program that could not be called with all samples at once.

    Raises:
        InputsError: at the start, on all ranks alike.
    """
    if count < 1:
        raise InputsError(f"microbatches={count}: there is at least 1", help="leave it out")
    if count > 1 and record.obstacle:
        raise InputsError(
            f"{count} micro-batches of {record.of!r} are not the whole batch: {record.obstacle}",
            help="return one value per sample along dim 0, or load with microbatches=1",
        )


def cut_inputs(given: Tensors, record: StageRecord, rows: Sequence[BoundaryRecord], count: int) -> list[Tensors]:
    """Return the inputs of each micro-batch: a part of the batch, and the same of everything else.

    All ranks have all inputs, so all raise alike: a rank that raised alone would leave the others waiting.

    Raises:
        InputsError: an input has another dtype or shape than so many micro-batches take.
    """
    sizes = dict[str, int]()
    for row in rows:
        parts = count if row.name in record.batched_inputs else 1
        _check_input(given[row.name], row, parts, sizes)
    return [
        {name: value.chunk(count)[at] if name in record.batched_inputs else value for name, value in given.items()}
        for at in range(count)
    ]


def _check_input(value: torch.Tensor, row: BoundaryRecord, parts: int, sizes: dict[str, int]) -> None:
    """Compare an input with its record; `sizes` are those of the dynamic dims before it."""
    is_shard = "S(" in row.sharding
    dtype = dtype_of(row.dtype)
    fits = value.dtype == dtype and value.ndim == len(row.shape)
    for dim, (got, size) in enumerate(zip(value.shape, row.shape, strict=False)):
        times = 1 if dim else parts
        fits &= got % times == 0
        if fits and not is_shard and (isinstance(size, int) or size.isidentifier()):
            own = size if isinstance(size, int) else sizes.setdefault(size, got // times)
            fits = got == own * times
    if not fits:
        shape = ", ".join(
            f"{parts} x {size}" if parts > 1 and not dim else str(size) for dim, size in enumerate(row.shape)
        )
        raise InputsError(
            f"input {row.name!r} is {value.dtype} {list(value.shape)}, the program takes {dtype} [{shape}]"
            + (f" with {' and '.join(f'{name} = {size}' for name, size in sizes.items())}" if sizes else ""),
            help="give a tensor of that dtype and shape"
            + (f": the parts of {parts} micro-batches follow each other along dim 0" if parts > 1 else ""),
        )


def join_outputs(name: str, parts: Sequence[torch.Tensor], record: StageRecord) -> torch.Tensor:
    """Return an output of all micro-batches: joined along the batch, or what they all have alike."""
    return torch.cat(list(parts)) if len(parts) > 1 and name in record.batched_outputs else parts[0]
