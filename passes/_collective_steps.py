"""Single steps of a change of sharding, as changes along a line of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tpcompiler.cost.path import Step, is_flat, spans_of
from tpcompiler.ir.dim_sharding import WHOLE, DimSharding, Level, Size, chunk
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.sharding import Sharding

LINE = "line"


@dataclass(frozen=True)
class Line:
    """One step as a change over a line of ranks, of the part of the tensor that a group's ranks hold together.

    Its mesh has one axis, or the step's axes where their nested shares are not those of one axis.
    `shape`: the shape of that part; a symbolic size is read off the local tensor when it is needed.
    """

    kind: str
    axes: tuple[str, ...]
    source: Sharding
    target: Sharding
    shape: tuple[Size, ...]
    mesh: Mesh
    here: int

    def local_shapes(self) -> tuple[tuple[Size, ...], ...]:
        """Return the shapes of the rank's share before and after the step."""
        here = self.mesh.coordinate(self.here)
        return tuple(end.local_shape(self.shape, self.mesh, here) for end in (self.source, self.target))

    def facts(self) -> tuple[Any, ...]:
        """Return all that the graph of the step depends on; an exchange names the ranks that it sends to."""
        place = [self.here] if self.source.has_spans else []
        return (self.shape, *self.local_shapes(), self.keeps_all, *place)

    @property
    def keeps_all(self) -> bool:
        """True if the step slices what other groups hold, and this one keeps all of its part."""
        return self.kind == "slice" and not any(by.axes for by in self.target.dims)


def put_on_line(step: Step, shape: Sequence[Size], mesh: Mesh, rank: int, order: Sequence[int]) -> Line:
    """Return the step as a change of its group's part of the tensor, with the dims in `order`."""
    coordinate = mesh.coordinate(rank)
    if any(want.spans and want != have for have, want in zip(step.source.dims, step.target.dims, strict=True)):
        return _put_spans_on_line(step, shape, mesh, rank, order)
    own = mesh.along(step.axes)
    cuts = [(cut, size) for state in (step.source, step.target) for cut, size in zip(state.dims, shape, strict=True)]
    is_line = all(_on_one_axis(cut, size, step.axes, mesh) for cut, size in cuts)
    line = _line(own) if is_line else own
    ends, sizes = [], list(shape)
    for state in (step.source, step.target):
        dims = []
        for dim, (cut, size) in enumerate(zip(state.dims, shape, strict=True)):
            extent, by = _along(cut, size, step.axes, mesh, coordinate, line)
            dims.append(by)
            if by.axes or state is step.source:
                sizes[dim] = extent
        partial = tuple((line.names[0], op) for axis, op in state.partial if axis == step.axes[0])
        ends.append(Sharding(tuple(dims), partial).permuted(order))
    shape_in_order = tuple(sizes[dim] for dim in order)
    return Line(step.kind, step.axes, ends[0], ends[1], shape_in_order, line, mesh.index(step.axes, rank))


def _line(own: Mesh) -> Mesh:
    """Return the mesh of one axis with the ranks of a group, in the shares that its one axis has."""
    return Mesh(((LINE, own.world_size),), shares=tuple((LINE, each) for _, each in own.shares if len(own.axes) == 1))


def _put_spans_on_line(step: Step, shape: Sequence[Size], mesh: Mesh, rank: int, order: Sequence[int]) -> Line:
    """Return a step into spans: from shares, which are spans too, or from the whole dim."""
    here, line = mesh.coordinate(rank), _line(mesh.along(step.axes))
    ends, sizes = [], list(shape)
    for state in (step.source, step.target):
        dims = []
        for dim, (cut, other) in enumerate(zip(state.dims, step.target.dims, strict=True)):
            is_here = other.spans and other != step.source.dims[dim]
            runs = [(run.start, run.stop) for run in spans_of(cut, shape[dim], mesh)] if is_here and cut.axes else []
            dims.append(DimSharding.by(LINE).spanning(runs) if runs else WHOLE)
            sizes[dim] = shape[dim] if is_here else cut.local_size(shape[dim], mesh, here)
        ends.append(Sharding(tuple(dims)).permuted(order))
    in_order = tuple(sizes[dim] for dim in order)
    return Line(step.kind, step.axes, ends[0], ends[1], in_order, line, mesh.index(step.axes, rank))


def _on_one_axis(cut: DimSharding, size: Size, axes: tuple[str, ...], mesh: Mesh) -> bool:
    """Return True if a group over these axes shards a dim as one axis would."""
    if cut.parts:
        return all(_on_one_axis(how, length, axes, mesh) for length, how in cut.parts)
    own = [cut.axes.index(axis) for axis in axes if axis in cut.axes]
    return not own or (len(own) == len(axes) and is_flat(cut, min(own), size, mesh))


def _along(
    cut: DimSharding, size: Size, axes: tuple[str, ...], mesh: Mesh, here: Mapping[str, int], line: Mesh
) -> tuple[Size, DimSharding]:
    """Return the part of a dim that a group over these axes holds together, and how the group shards it."""
    if not (own := [axis for axis in axes if axis in cut.axes]):
        return cut.local_size(size, mesh, here), WHOLE
    if cut.parts:
        parts = [_along(how, length, axes, mesh, here, line) for length, how in cut.parts]
        extent, by = sum(length for length, _ in parts), DimSharding.of_parts(parts)
    else:
        outer = min(map(cut.axes.index, own))
        count, piece = 1, size
        for _, count, piece in DimSharding(cut.levels[:outer]).pieces(size, mesh, here):  # noqa: B007  (the last of them)
            pass
        first, *rest = cut.levels[outer:]
        nested = any(level.block for level in cut.levels[:outer])
        first = first._replace(block=first.block or (piece if nested else 0))
        if line.names == (LINE,):  # several axes cut evenly, between any units
            first, rest = Level(LINE, first.block, 1 if rest else first.unit), []
        extent, by = count * piece, DimSharding((first, *rest))
    is_empty = isinstance(extent, int) and extent == 0  # no rank of the group has any block, part or unit of it
    return extent, DimSharding.by(*(line.names if line.names == (LINE,) else own)) if is_empty else by


def numbers_of(line: Line) -> list[int]:
    """Return the numbers that a rank needs to slice off its part: the part's start, in units, or one start per part.

    For a dynamic dim, whose rows are numbered, it is the rank's place on the line. Other steps need no number.
    """
    if line.kind != "slice" or line.source.has_spans or line.keeps_all:
        return []
    ((by, size),) = ((by, size) for by, size in zip(line.target.dims, line.shape, strict=True) if by.axes)
    if by.parts:
        return list(_begins(by, size, line))
    if by.spans:
        return [by.spans[line.here][0]]
    (start,) = _begins(by, size, line)
    return [start // by.levels[0].unit]


def _begins(by: DimSharding, size: Size, line: Line) -> Iterator[int]:
    if by.parts:
        for length, how in by.parts:
            yield from _begins(how, length, line)
    elif by.axes:
        ((_, block, unit),) = by.levels
        start = chunk(block or size, line.mesh.deals(line.mesh.names[0]), line.here, unit)[0]
        yield start if isinstance(start, int) else line.here
