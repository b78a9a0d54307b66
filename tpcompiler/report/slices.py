"""The slice of a tensor that each rank holds, as plain numbers for drawing."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from msgspec import Struct

from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.sharding import Sharding

MOST_RUNS = 64  # of one dim and rank; a merged dim of batch * heads may have thousands

Run = tuple[int, int]  # the first element, and the end


@dataclass(frozen=True)
class DimPiece:
    """Elements of a dim in a row that the same ranks hold."""

    start: int
    stop: int
    ranks: frozenset[int]


class Holder(Struct, frozen=True):
    """Ranks that hold one slice: their local shape, and the runs of each dim."""

    ranks: list[int]
    local: list[int | str]
    runs: list[Sequence[Run]]


class Slices(Struct, frozen=True):
    """The slices of a global tensor, equal ones once."""

    shape: list[int | str]  # the global sizes
    of: list[int]  # the number of what the runs of each dim count: elements, or, of a symbolic size, equal shares
    sharding: str
    pending: list[tuple[str, str]]  # (axis, op) of what is still to be reduced
    holders: list[Holder]


def slices_of(shape: Sequence[int | str], sharding: Sharding, mesh: Mesh, most: int | None = MOST_RUNS) -> Slices:
    """Return the slices of a global tensor, with at most `most` runs of each dim."""
    counts = [
        size if isinstance(size, int) else mesh.size(by.axes) for size, by in zip(shape, sharding.dims, strict=True)
    ]
    holders: dict[Any, list[int]] = {}
    for rank in range(mesh.world_size):
        here = mesh.coordinate(rank)
        dims = zip(sharding.dims, counts, strict=True)
        held = tuple(tuple((run.start, run.stop) for run in by.runs(count, mesh, here)) for by, count in dims)
        holders.setdefault(held, []).append(rank)
    return Slices(
        shape=list(shape),
        of=counts,
        sharding=sharding.text(mesh),
        pending=list(sharding.join_factors(mesh)[0].partial),
        holders=[
            Holder(ranks, _local(shape, counts, runs), [dim[:most] for dim in runs]) for runs, ranks in holders.items()
        ],
    )


def pieces_of(slices: Slices, dim: int) -> list[DimPiece]:
    """Split a dim wherever a rank's run begins or ends; the slices must have all of their runs."""
    holders = [(frozenset(holder.ranks), holder.runs[dim]) for holder in slices.holders]
    ends = sorted({end for _, runs in holders for run in runs for end in run})
    holders_at: list[set[int]] = [set() for _ in ends]
    for ranks, runs in holders:
        for start, stop in runs:
            for at in range(bisect_left(ends, start), bisect_left(ends, stop)):
                holders_at[at] |= ranks
    return [DimPiece(*both, frozenset(ranks)) for both, ranks in zip(pairwise(ends), holders_at, strict=False)]


def _local(shape: Sequence[int | str], counts: Sequence[int], runs: Sequence[Sequence[Run]]) -> list[int | str]:
    counts_held = [sum(stop - start for start, stop in dim) for dim in runs]
    return [
        own if isinstance(size, int) else size if own == count else f"{size}*{own}/{count}"
        for size, count, own in zip(shape, counts, counts_held, strict=True)
    ]
