"""Single steps of a change of sharding, as changes along a line of ranks, and their bodies for make_fx to trace."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tpcompiler._torch import c10d_functional
from tpcompiler.cost.path import Step, overlap, spans_of
from tpcompiler.ir.dim_sharding import WHOLE, DimSharding, Size
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.nan_safe_reduce import decode, encode, is_lossy
from tpcompiler.ir.sharding import Sharding
from tpcompiler.ir.shares import NEUTRAL, cut_dim, join_dim

BY_FIRST = "hold by first"  # the kind of a hold whose value the first rank alone has


@dataclass(frozen=True)
class Line:
    """One step as a change over a line of ranks, of the part of the tensor that a group's ranks hold together.

    `shape`: the shape of that part; a symbolic size is read off the local tensor when it is needed.
    `mesh`: the step's axes. `group`: the name of the process group.
    """

    kind: str
    source: Sharding
    target: Sharding
    shape: tuple[Size, ...]
    mesh: Mesh
    group: str
    here: int

    def facts(self) -> tuple[Any, ...]:
        """Return all that the graph of the step depends on; an exchange names the ranks that it sends to."""
        here, place = self.mesh.coordinate(self.here), [self.here] if self.source.has_spans else []
        local = (end.local_shape(self.shape, self.mesh, here) for end in (self.source, self.target))
        return (self.shape, *local, self.keeps_all, *place)

    @property
    def is_grid(self) -> bool:
        """True if all ranks hold equal shares, each a box of the whole, or of every block."""
        cuts = ((by, size) for end in (self.source, self.target) for by, size in zip(end.dims, self.shape, strict=True))
        return not self.mesh.is_unequal(self.mesh.names) and all(
            not by.parts and (not isinstance(size, int) or by.is_even(size, self.mesh)) for by, size in cuts
        )

    @property
    def keeps_all(self) -> bool:
        """True if the step slices what other groups hold, and this one keeps all of its part."""
        return self.kind == "slice" and not any(by.axes for by in self.target.dims)


def put_on_line(step: Step, value: torch.Tensor, mesh: Mesh, rank: int, order: Sequence[int]) -> Line:
    """Return the step as a change of its group's part of the tensor, with the dims in `order`."""
    here, shape = mesh.coordinate(rank), value.shape
    ends, sizes = [], list(shape)
    for state in (step.source, step.target):
        dims = []
        for dim, (cut, size) in enumerate(zip(state.dims, shape, strict=True)):
            goal = step.target.dims[dim]
            is_into_spans = goal.spans and goal != step.source.dims[dim]
            extent, by = (_spans if is_into_spans else _along)(cut, size, step.axes, mesh, here)
            dims.append(by)
            if by.axes or state is step.source:
                sizes[dim] = extent
        partial = tuple(pending for pending in state.partial if pending[0] in step.axes)
        ends.append(Sharding(tuple(dims), partial).permute(order))
    own, group = mesh.along(step.axes), mesh.group_name(step.axes)
    in_order = tuple(sizes[dim] for dim in order)
    kind = BY_FIRST if step.kind == "hold" and _has_no_shares(ends[1].partial[0][1], value.dtype) else step.kind
    return Line(kind, ends[0], ends[1], in_order, own, group, mesh.index(step.axes, rank))


def _has_no_shares(op: str, dtype: torch.dtype) -> bool:
    """Return True if ranks cannot hold equal terms of a pending reduction: of a sum of integers, or a product."""
    return op == "product" or (op == "sum" and not (dtype.is_floating_point or dtype.is_complex))


def _spans(
    cut: DimSharding, size: Size, axes: tuple[str, ...], mesh: Mesh, _: Mapping[str, int]
) -> tuple[Size, DimSharding]:
    """Return a dim that changes into spans, and its shares as spans."""
    runs = [(run.start, run.stop) for run in spans_of(cut, size, mesh)] if cut.axes else []
    return size, DimSharding.by(*axes).with_spans(runs) if runs else WHOLE


def _along(
    cut: DimSharding, size: Size, axes: tuple[str, ...], mesh: Mesh, here: Mapping[str, int]
) -> tuple[Size, DimSharding]:
    """Return the part of a dim that a group over these axes holds together, and how the group shards it."""
    if not (own := [axis for axis in axes if axis in cut.axes]):
        return cut.local_size(size, mesh, here), WHOLE
    if cut.parts:
        parts = [_along(how, length, axes, mesh, here) for length, how in cut.parts]
        extent, by = sum(length for length, _ in parts), DimSharding.of_parts(parts)
    else:
        outer = min(map(cut.axes.index, own))
        count, piece = 1, size
        for _, count, piece in DimSharding(cut.levels[:outer]).pieces(size, mesh, here):  # noqa: B007  (the last of them)
            pass
        first, *rest = cut.levels[outer:]
        nested = any(level.block for level in cut.levels[:outer])
        first = first._replace(block=first.block or (piece if nested else 0))
        extent, by = count * piece, DimSharding((first, *rest))
    is_empty = isinstance(extent, int) and extent == 0  # no rank of the group has any block, part or unit of it
    return extent, DimSharding.by(*own) if is_empty else by


def numbers_of(line: Line) -> list[int]:
    """Return the numbers that a rank needs to slice off its part: where the part begins, or one start per part.

    For a dynamic dim, whose rows are numbered, and to find the first rank, it is the place on the line. Other steps
    need no number.
    """
    if line.kind == BY_FIRST:
        return [line.here]
    if line.kind != "slice" or line.source.has_spans:
        return []
    return [start for by, size in zip(line.target.dims, line.shape, strict=True) for start in _begins(by, size, line)]


def _begins(by: DimSharding, size: Size, line: Line) -> Iterator[int]:
    if by.parts:
        for length, how in by.parts:
            yield from _begins(how, length, line)
    elif by.axes:
        start, _ = by.of_block(0).share(by.block or size, line.mesh, line.mesh.coordinate(line.here))
        yield start if isinstance(start, int) else line.here


def change_on_line(x: torch.Tensor, line: Line, numbers: Iterator[torch.Tensor]) -> torch.Tensor:
    """Run one step, which reads its `numbers_of`; a max or min of floats runs on integers: no backend loses NaN."""
    lossy = [op for _, op in line.source.partial if is_lossy(op, x.dtype)]
    if not lossy:
        return _change(x, line, numbers)
    return decode(_change(encode(x, lossy[0]), line, numbers), x.dtype)


def _change(x: torch.Tensor, line: Line, numbers: Iterator[torch.Tensor]) -> torch.Tensor:
    """Divide a value into one row per rank, run a collective over rows, and assemble the rows of all ranks."""
    if line.keeps_all:
        return x
    if line.source.has_spans:
        return _into_spans(x, line)
    if line.kind == "slice":
        return _slice(x, line, numbers)
    if line.kind in ("hold", BY_FIRST):
        return _hold(x, line, numbers)
    if line.kind == "all_reduce":
        return _call("all_reduce", x, line.source.partial[0][1], line.group)
    return _over_grid(x, line) if line.is_grid else _by_pieces(x, line)


def _call(name: str, x: torch.Tensor, *args: Any) -> torch.Tensor:
    return c10d_functional.wait_tensor(getattr(c10d_functional, name)(x, *args))  # type: ignore[no-any-return]


def _gather(rows: torch.Tensor, line: Line) -> torch.Tensor:
    return _call("all_gather_into_tensor", rows, line.mesh.world_size, line.group)


def _scatter(rows: torch.Tensor, line: Line) -> torch.Tensor:
    return _call("reduce_scatter_tensor", rows, line.source.partial[0][1], line.mesh.world_size, line.group)


def _hold(x: torch.Tensor, line: Line, numbers: Iterator[torch.Tensor]) -> torch.Tensor:
    """Return this rank's term of a pending reduction: an equal share, or a neutral value except on the first rank."""
    ((_, op),) = line.target.partial
    if line.kind == BY_FIRST:
        return torch.where(next(numbers) == 0, x, torch.full_like(x, NEUTRAL[op]))
    return x / line.mesh.world_size if op == "sum" else x


def _slice(x: torch.Tensor, line: Line, numbers: Iterator[torch.Tensor]) -> torch.Tensor:
    """Return this rank's part of a dim: the rows from each number on, or that row of a dynamic dim."""

    def take(x: torch.Tensor, dim: int, _: Size, size: Size) -> torch.Tensor:
        if isinstance(size, int):
            return x.index_select(dim, torch.arange(size, device=x.device) + next(numbers))
        # A view with one row per rank raises if the size is no multiple of the degree; a slice would drop the rest.
        rows = x.reshape([*x.shape[:dim], ranks, x.shape[dim] // ranks, *x.shape[dim + 1 :]])
        return rows.index_select(dim, next(numbers).reshape(1)).squeeze(dim)

    ranks, (dim,) = line.mesh.world_size, (dim for dim, by in enumerate(line.target.dims) if by.axes)
    return cut_dim(x, dim, line.target.dims[dim], line.mesh, line.mesh.coordinate(line.here), take)


def _over_grid(x: torch.Tensor, line: Line) -> torch.Tensor:
    """Change dims whose shares are equal boxes of the whole."""
    ranks, source, target = line.mesh.world_size, line.source.dims, line.target.dims
    if line.kind == "all_gather":
        if _is_in_rows(source, line.mesh):
            return _gather(x, line)
        return _from_boxes(_gather(x.unsqueeze(0), line), source, line.mesh)
    if line.kind == "all_to_all":
        rows = _call("all_to_all_single", _to_boxes(x, target, line.mesh), [1] * ranks, [1] * ranks, line.group)
        return _from_boxes(rows, source, line.mesh)
    if _is_in_rows(target, line.mesh):
        return _scatter(x, line)
    cut = [dim for dim, by in enumerate(target) if by.axes]
    if len(cut) == 1 and isinstance(x.shape[cut[0]], int) and target[cut[0]] == DimSharding.by(*line.mesh.names):
        return _scatter(torch.cat(torch.chunk(x, ranks, cut[0])), line)  # as torch does
    return _scatter(_to_boxes(x, target, line.mesh), line).squeeze(0)


def _is_in_rows(dims: Sequence[DimSharding], mesh: Mesh) -> bool:
    """Return True if the ranks' shares are one after the other in memory."""
    return dims[0].axes == mesh.names and not dims[0].block


def _to_boxes(x: torch.Tensor, dims: Sequence[DimSharding], mesh: Mesh) -> torch.Tensor:
    """Return the ranks' shares of a value as rows of a new first dim."""
    local = [size // mesh.size(by.axes) for size, by in zip(x.shape, dims, strict=True)]
    sizes, order = _grid(local, dims, mesh)
    boxes = x.reshape(sizes)
    if order != sorted(order):
        boxes = boxes.permute(order).clone(memory_format=torch.contiguous_format)
    return boxes if len(sizes) == 1 + x.ndim else boxes.view([mesh.world_size, *local])


def _from_boxes(rows: torch.Tensor, dims: Sequence[DimSharding], mesh: Mesh) -> torch.Tensor:
    """Return the value of which these rows are the ranks' shares."""
    local = rows.shape[1:]
    sizes, order = _grid(local, dims, mesh)
    boxes = rows if len(sizes) == rows.ndim else rows.view([sizes[place] for place in order])
    if order != sorted(order):
        back = [order.index(place) for place in range(len(order))]
        boxes = boxes.permute(back).clone(memory_format=torch.contiguous_format)
    return boxes.view([size * mesh.size(by.axes) for size, by in zip(local, dims, strict=True)])


def _grid(local: Sequence[Size], dims: Sequence[DimSharding], mesh: Mesh) -> tuple[list[Size], list[int]]:
    """Return the sizes of a value taken apart into blocks, ranks and elements, and the order that puts ranks first."""
    is_line = any(by.axes == mesh.names for by in dims)  # axes that deal one dim are as one
    sizes, ranks = list[Size](), dict[str, int]()
    for size, by in zip(local, dims, strict=True):
        if by.block:
            share = by.block // mesh.size(by.axes)
            sizes, size = [*sizes, size // share], share
        for axis in by.axes[:1] if is_line else by.axes:
            ranks[axis] = len(sizes)
            sizes.append(mesh.world_size if is_line else mesh.degree(axis))
        sizes.append(size)
    first = [ranks[axis] for axis in mesh.names if axis in ranks]
    return sizes, [*first, *(place for place in range(len(sizes)) if place not in first)]


def _by_pieces(x: torch.Tensor, line: Line) -> torch.Tensor:
    """Change dims piece by piece: unequal or uneven shares, and parts in a row."""
    source, target, mesh = line.source, line.target, line.mesh
    # Symbolic sizes are computed from the local tensor, as the traced graph must do.
    shape = [
        size if isinstance(size, int) else here * mesh.size(by.axes)
        for size, here, by in zip(line.shape, x.shape, source.dims, strict=True)
    ]
    ranks = [mesh.coordinate(rank) for rank in range(mesh.world_size)]
    own = [x] * len(ranks)
    for dim, by in enumerate(target.dims):
        own = [cut_dim(part, dim, by, mesh, other) for part, other in zip(own, ranks, strict=True)]
    if line.kind == "reduce_scatter":
        most = _most([part.shape for part in own])
        received = _scatter(torch.stack([_pad(part, most) for part in own]), line).squeeze(0)
        trimmed = _trim(received, own[line.here].shape)
        return received if trimmed is received else trimmed.clone(memory_format=torch.contiguous_format)
    shapes = [
        [local if isinstance(size, int) else here for size, local, here in zip(shape, locals, x.shape, strict=True)]
        for locals in (source.local_shape(shape, mesh, other) for other in ranks)
    ]
    if line.kind == "all_to_all":
        (dim,) = (dim for dim, by in enumerate(source.dims) if by.axes)
        pieces = _exchange(own, dim, [each[dim] for each in shapes], line)
    else:
        rows = _gather(_pad(x, _most(shapes)).unsqueeze(0), line)
        pieces = [_trim(rows.select(0, other), each) for other, each in enumerate(shapes)]
    return _join(pieces, source, shape, mesh)


def _join(pieces: Sequence[torch.Tensor], source: Sharding, shape: Sequence[Size], mesh: Mesh) -> torch.Tensor:
    """Join the pieces of all ranks, one dim after the other."""
    for dim in (d for d, by in enumerate(source.dims) if by.axes):
        by = source.dims[dim]
        rest = [axis for axis in mesh.names if axis not in by.axes]
        groups, line = mesh.groups(by.axes), mesh.along(mesh.ordered(by.axes))
        pieces = [join_dim([pieces[rank] for rank in ranks], dim, by, shape[dim], line) for ranks in groups]
        mesh = mesh.along(rest) if rest else line
    return pieces[0]


def _most(shapes: Sequence[Sequence[Size]]) -> list[Size]:
    """Return the largest size of each dim; a dynamic one is the same in all."""
    return [
        max(sizes) if all(isinstance(size, int) for size in sizes) else sizes[0] for sizes in zip(*shapes, strict=True)
    ]


def _pad(x: torch.Tensor, shape: Sequence[Size]) -> torch.Tensor:
    for dim, size in enumerate(shape):
        if isinstance(size, int) and (missing := size - x.shape[dim]):
            x = torch.cat([x, x.new_zeros([missing if d == dim else s for d, s in enumerate(x.shape)])], dim)
    return x


def _trim(x: torch.Tensor, shape: Sequence[Size]) -> torch.Tensor:
    for dim, size in enumerate(shape):
        x = x.narrow(dim, 0, size) if isinstance(size, int) and x.shape[dim] != size else x
    return x


def _into_spans(x: torch.Tensor, line: Line) -> torch.Tensor:
    """Send each rank the elements of its span that it lacks, and put the own ones between those that others send."""
    (dim,) = (dim for dim, by in enumerate(line.target.dims) if by.spans)
    have, want = ([range(*span) for span in end.dims[dim].spans] for end in (line.source, line.target))
    ranks, rank, own = range(len(have)), line.here, have[line.here]

    def lacks(sender: int, receiver: int) -> range:
        return overlap(have[sender], want[receiver]) if sender != receiver else range(0)

    def part(run: range) -> torch.Tensor:
        return x.narrow(dim, run.start - own.start if run else 0, len(run))

    kept = overlap(own, want[rank])
    if not any(lacks(a, b) for a in ranks for b in ranks):
        return part(kept).clone(memory_format=torch.contiguous_format)
    row = math.prod([size for at, size in enumerate(x.shape) if at != dim])
    senders = [other for other in ranks if lacks(other, rank)] or [rank]  # a rank that gets nothing gets no rows
    sent = [part(run).reshape(-1) for other in ranks if (run := lacks(rank, other))] or [part(range(0)).reshape(-1)]
    sizes_out, sizes_in = (
        [row * len(lacks(*pair)) for pair in pairs]
        for pairs in (
            [(other, rank) for other in ranks],
            [(rank, other) for other in ranks],
        )
    )
    flat = _call("all_to_all_single", torch.cat(sent), sizes_out, sizes_in, line.group)
    received = torch.split(flat, [sizes_out[other] for other in senders]) if senders[1:] else [flat]
    pieces = [(rank, part(kept))] if kept else []
    for other, piece in zip(senders, received, strict=True):
        pieces.append((other, piece.reshape([*x.shape[:dim], len(lacks(other, rank)), *x.shape[dim + 1 :]])))
    pieces.sort(key=lambda pair: have[pair[0]].start)
    return torch.cat([piece for _, piece in pieces], dim)


def _exchange(sent: Sequence[torch.Tensor], before: int, rows: Sequence[Size], line: Line) -> list[torch.Tensor]:
    """Return the tensors that all ranks send to this one, each with its own number of rows of dim `before`."""
    own = sent[line.here].shape
    shapes_in = [[*own[:before], size, *own[before + 1 :]] for size in rows]
    sizes_out = [math.prod(piece) for piece in shapes_in]
    flat = torch.cat([piece.reshape(-1) for piece in sent])
    flat = _call("all_to_all_single", flat, sizes_out, [math.prod(piece.shape) for piece in sent], line.group)
    return [p.reshape(piece) for p, piece in zip(torch.split(flat, sizes_out), shapes_in, strict=True)]
