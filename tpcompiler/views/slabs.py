"""Tensors cut into slabs of cells, one per set of ranks, for drawing as text or SVG."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from tpcompiler.errors import one_line
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.shares import row_sharding
from tpcompiler.runtime.records import PlacedRecord
from tpcompiler.views.slices import DimPiece, Holder, Slices, pieces_of, slices_of

MOST_PIECES = 32  # of a dim
MOST_SLABS = 12  # of a drawing
MOST_NAMED = 8  # ranks in a cell, and runs in a line
WIDTH = 80  # letters


@dataclass(frozen=True)
class Slab:
    """The last two dims (a single row for one dim) at one piece of each earlier dim.

    Attributes:
        title: `[0:4, :, :]`, or empty for a single slab.
        rows: the pieces of the last dim but one, with their labels, `0:8`.
        columns: the pieces of the last dim.
        cells: the ranks that hold the elements, row by row: `0,1`, or `0+1` for a pending reduction.
    """

    title: str
    rows: Sequence[tuple[str, DimPiece]]
    columns: Sequence[tuple[str, DimPiece]]
    cells: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Drawn:
    """Tensors of one shape, dtype and sharding: lines of at most `WIDTH` letters, and the slabs between them."""

    head: Sequence[str]
    slabs: Sequence[Slab]
    holders: Sequence[str]


def draw_tensors(names: Sequence[str], row: PlacedRecord, mesh: Mesh) -> Drawn:
    """Draw equal tensors that have this row in the manifest."""
    slices = slices_of(row.shape, row_sharding(row, mesh), mesh, most=None)
    shape = ", ".join(map(str, row.shape))
    head = [f"{', '.join(names)}: {row.dtype}[{shape}], {slices.sharding} on {mesh}"]
    head += [f"over {axis} a pending {op}: the {op} of what the ranks hold" for axis, op in slices.pending]
    pieces = [pieces_of(slices, dim) for dim in range(len(slices.of))]
    head += [
        f"drawn: the first {MOST_PIECES} of {len(found):,} pieces of dim {dim}"
        for dim, found in enumerate(pieces)
        if len(found) > MOST_PIECES
    ]
    slabs = list(_slabs(slices, [found[:MOST_PIECES] for found in pieces], mesh)) if pieces and all(pieces) else []
    if len(slabs) > MOST_SLABS:
        head.append(f"drawn: the first {MOST_SLABS} of {len(slabs):,} slabs")
    return Drawn(_wrapped(head), slabs[:MOST_SLABS], _wrapped(_holder(each, slices) for each in slices.holders))


def _slabs(slices: Slices, pieces: Sequence[Sequence[DimPiece]], mesh: Mesh) -> Iterator[Slab]:
    labels = [[(_label(slices, dim, each.start, each.stop), each) for each in own] for dim, own in enumerate(pieces)]
    everyone = DimPiece(0, 1, frozenset(range(mesh.world_size)))
    *leads, rows, columns = labels if len(labels) > 1 else [[("", everyone)], *labels]
    pending = [axis for axis, _ in slices.pending]
    for leading in product(*leads):
        ranks = everyone.ranks.intersection(*(each.ranks for _, each in leading))
        title = ", ".join([*(label for label, _ in leading), ":", ":"])
        cells = [
            [cell_text(ranks & row.ranks & column.ranks, pending, mesh) for _, column in columns] for _, row in rows
        ]
        yield Slab(f"[{title}]" if leading else "", rows, columns, cells)


def cell_text(ranks: Collection[int], pending: Sequence[str], mesh: Mesh) -> str:
    """Return `0,1` for replicas, and `0+1` for shares of a pending reduction."""
    groups: dict[tuple[int, ...], list[str]] = {}
    for rank in sorted(ranks):
        here = mesh.coordinate(rank)
        groups.setdefault(tuple(c for axis, c in here.items() if axis not in pending), []).append(str(rank))
    return _listed([_listed(group, "+") for group in groups.values()], ",")


def _listed(names: Sequence[str], sign: str) -> str:
    return sign.join(names if len(names) <= MOST_NAMED else [*names[:2], "..", names[-1]])


def _label(slices: Slices, dim: int, start: int, stop: int) -> str:
    """Return `0:8`, or `0/2:1/2` for a dynamic size."""
    parts = "" if slices.of[dim] == slices.shape[dim] else f"/{slices.of[dim]}"
    return f"{start}{parts}:{stop}{parts}"


def _holder(holder: Holder, slices: Slices) -> str:
    """Return a line such as `ranks 0, 1: [8, 8], the slice [0:8, :]`."""
    dims = [
        ":"
        if runs == ((0, slices.of[dim]),)
        else _listed([_label(slices, dim, *run) for run in runs], " + ") or "nothing"
        for dim, runs in enumerate(holder.runs)
    ]
    ranks = ", ".join(map(str, holder.ranks))
    local = ", ".join(map(str, holder.local))
    return f"rank{'s' * (len(holder.ranks) > 1)} {ranks}: [{local}], the slice [{', '.join(dims)}]"


def _wrapped(lines: Iterable[str]) -> list[str]:
    return [
        part
        for line in lines
        for part in textwrap.wrap(one_line(line), WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    ]
