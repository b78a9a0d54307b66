"""Single steps of a change of sharding, as changes along a line of ranks, and their bodies for make_fx to trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard

from tpcompiler._torch import DeviceMesh, c10d_functional, redistribute
from tpcompiler.cost.path import Step, is_flat, overlap, spans_of
from tpcompiler.ir.dim_sharding import WHOLE, DimSharding, Level, Size, chunk
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.nan_safe_reduce import decode, encode, is_lossy
from tpcompiler.ir.sharding import Sharding
from tpcompiler.ir.shares import cut_dim, join_dim

LINE = "line"
Number = Callable[[], torch.Tensor]  # returns the next of `numbers_of`


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
        ends.append(Sharding(tuple(dims), partial).permute(order))
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
            dims.append(DimSharding.by(LINE).with_spans(runs) if runs else WHOLE)
            sizes[dim] = shape[dim] if is_here else cut.local_size(shape[dim], mesh, here)
        ends.append(Sharding(tuple(dims)).permute(order))
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


def change_on_line(x: torch.Tensor, line: Line, over: DeviceMesh, number: Number) -> torch.Tensor:
    """Run one step; a max or min of floats runs on integers, among which no backend loses NaN."""
    lossy = [op for _, op in line.source.partial if is_lossy(op, x.dtype)]
    if not lossy:
        return _change(x, line, over, number)
    return decode(_change(encode(x, lossy[0]), line, over, number), x.dtype)


def _change(x: torch.Tensor, line: Line, over: DeviceMesh, number: Number) -> torch.Tensor:
    if line.keeps_all:
        return x
    source, target, mesh, rank = line.source, line.target, line.mesh, line.here
    # Symbolic sizes are computed from the local tensor, as the traced graph must do.
    shape = tuple(
        size if isinstance(size, int) else x.shape[d] * mesh.size(source.dims[d].axes)
        for d, size in enumerate(line.shape)
    )
    here = mesh.coordinate(rank)
    if source.has_spans:
        return _into_spans(x, source, target, rank, over.get_group(0).group_name)
    if len(mesh.names) > 1 and (source.partial or target.is_replicated) and _is_grid(source, target, shape, mesh):
        return _over_grid(x, source, target, mesh, over)
    is_unequal = mesh.is_unequal(mesh.names) and line.kind in ("all_gather", "all_to_all", "reduce_scatter")
    if is_unequal or len(mesh.names) > 1 or any(dim.parts for dim in (*source.dims, *target.dims)):
        if line.kind == "slice":
            (dim,) = (d for d, by in enumerate(target.dims) if by.axes)
            return cut_dim(x, dim, target.dims[dim], mesh, here, lambda v, d, _, size: _rows_from(v, d, number(), size))
        return _by_pieces(x, source, target, shape, mesh, rank, over)
    local_target = target.local_shape(shape, mesh, here)
    ways = [a if a.axes else b for a, b in zip(source.dims, target.dims, strict=True)]
    blocks = [way.block for way in ways]
    apart = any(_unit(way) > 1 or way.block for way in ways)
    if apart:
        # For torch, a dim of blocks dealt out in units is three dims: blocks, units, and the elements of a unit.
        counts = [size // block if block else 1 for size, block in zip(shape, blocks, strict=True)]
        extents = [
            dim.of_block(0).share(block, mesh, here)[1] if block else size
            for dim, block, size in zip(source.dims, blocks, x.shape, strict=True)
        ]
        x = x.reshape(_apart(extents, counts, ways))
        shape = tuple(_apart([block or size for block, size in zip(blocks, shape, strict=True)], counts, ways))
        source, target = _by_unit(source, ways), _by_unit(target, ways)
    before = [d for d, dim in enumerate(source.dims) if dim.axes]
    after = [d for d, dim in enumerate(target.dims) if dim.axes]
    if line.kind == "slice":
        x = _own_part(x, after[0], target.dims[after[0]], shape, mesh, rank, number())
    elif before and after:
        x = _all_to_all(x, before[0], after[0], shape, mesh, rank, over.get_group(0).group_name)
    else:
        x = _over_even_shards(x, source, target, shape, mesh, rank, over)
    return x.reshape(local_target) if apart else x


def on_first(x: torch.Tensor, line: Line, place: torch.Tensor) -> torch.Tensor:
    """Return the value on the first rank, and a neutral value (0, or 1 for products) on the others."""
    ((_, op),) = line.target.partial
    return torch.where(place == 0, x, torch.full_like(x, 1 if op == "product" else 0))


def _own_part(
    x: torch.Tensor,
    dim: int,
    cut: DimSharding,
    shape: tuple[Size, ...],
    mesh: Mesh,
    rank: int,
    number: torch.Tensor,
) -> torch.Tensor:
    """Return this rank's part of a dim: the rows from `number` on, or that row of a dynamic dim."""
    size = shape[dim]
    if isinstance(size, int):
        return _rows_from(x, dim, number, cut.share(size, mesh, mesh.coordinate(rank))[1])
    # A view with one row per rank raises if the size is no multiple of the degree; a slice would drop the rest.
    return _rows(x, dim, mesh.world_size).index_select(dim, number.reshape(1)).squeeze(dim)


def _rows_from(x: torch.Tensor, dim: int, start: torch.Tensor, size: Size) -> torch.Tensor:
    return x.index_select(dim, torch.arange(size, device=x.device) + start)


def _over_even_shards(
    x: torch.Tensor,
    source: Sharding,
    target: Sharding,
    shape: tuple[Size, ...],
    mesh: Mesh,
    rank: int,
    over: DeviceMesh,
) -> torch.Tensor:
    """Run torch's own change, with the collective's dim padded to even shards and trimmed again.

    torch pads uneven shards itself, but in a way that fixes dynamic sizes to the example's.
    """
    (axis,) = mesh.names
    gathered = [d for d, dim in enumerate(source.dims) if dim.axes and not target.dims[d].axes]
    scattered = [d for d, dim in enumerate(target.dims) if dim.axes and source.partial]
    dynamic = any(not isinstance(shape[d], int) for d in gathered + scattered)
    padded, target_shape = list(shape), list(target.local_shape(shape, mesh, mesh.coordinate(rank)))
    for dim in gathered + scattered if not dynamic else ():
        step = chunk(shape[dim], mesh.degree(axis), 0)[1]
        padded[dim] = step * mesh.degree(axis)
        x = _pad(x, dim, step if dim in gathered else padded[dim])
    if scattered and dynamic:
        # Scatter as a first dim with one row per rank: torch would chunk a dynamic size, and guard on it.
        (dim,) = scattered
        rows = _rows(x, dim, mesh.degree(axis)).movedim(dim, 0)
        rows = rows.clone(memory_format=torch.contiguous_format)
        x = redistribute(rows, over, source.placements(mesh), [Shard(0)], list(rows.shape)).squeeze(0)
    elif gathered and (gathered[0] > 0 or dynamic):
        # Gather as a new first dim and move it into place: torch would split by a dynamic size, and guard on it.
        (dim,) = gathered
        whole = [mesh.degree(axis), *x.shape]
        x = redistribute(x.unsqueeze(0), over, [Shard(0)], [Replicate()], whole)
        x = (x.movedim(0, dim).clone(memory_format=torch.contiguous_format) if dim else x).view(padded)
    else:
        x = redistribute(x, over, source.placements(mesh), target.placements(mesh), padded)
    for dim in gathered + scattered if not dynamic else ():
        if x.shape[dim] != target_shape[dim]:
            x = x.narrow(dim, 0, target_shape[dim]).clone(memory_format=torch.contiguous_format)
    return x


def _rows(x: torch.Tensor, dim: int, degree: int) -> torch.Tensor:
    """Return a dim as `degree` equal rows in a new dim."""
    return x.reshape([*x.shape[:dim], degree, x.shape[dim] // degree, *x.shape[dim + 1 :]])


def _pad(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    missing = size - x.shape[dim]
    if not missing:
        return x
    return torch.cat([x, x.new_zeros([missing if d == dim else s for d, s in enumerate(x.shape)])], dim)


def _apart(sizes: Sequence[Size], counts: Sequence[Size], ways: Sequence[DimSharding]) -> list[Size]:
    """Return every size of (a block of) a dim as the sizes of blocks, units, and elements of a unit."""
    out: list[Size] = []
    for size, count, way in zip(sizes, counts, ways, strict=True):
        out += [count] * bool(way.block) + ([size // unit, unit] if (unit := _unit(way)) > 1 else [size])
    return out


def _unit(way: DimSharding) -> int:
    return way.levels[0].unit if way.levels else 1


def _by_unit(sharding: Sharding, ways: Sequence[DimSharding]) -> Sharding:
    dims: list[DimSharding] = []
    for dim, way in zip(sharding.dims, ways, strict=True):
        dims += [WHOLE] * bool(way.block) + [DimSharding.by(*dim.axes)] + [WHOLE] * (_unit(way) > 1)
    return Sharding(tuple(dims), sharding.partial)


def _is_grid(source: Sharding, target: Sharding, shape: Sequence[Size], mesh: Mesh) -> bool:
    """Return True if all ranks hold equal shares, each a box of the whole."""
    plain = not any(dim.parts or dim.block for dim in (*source.dims, *target.dims))
    return plain and source.is_even(shape, mesh) and target.is_even(shape, mesh)


def _over_grid(x: torch.Tensor, source: Sharding, target: Sharding, mesh: Mesh, over: DeviceMesh) -> torch.Tensor:
    """Gather or scatter boxes as rows of a new first dim; the ranks hold them in row-major order of the mesh's axes."""
    dims = [have.axes or want.axes for have, want in zip(source.dims, target.dims, strict=True)]
    degrees, axes = [mesh.degree(axis) for axis in mesh.names], len(mesh.names)
    if source.partial:
        local = [size // mesh.size(by) for size, by in zip(x.shape, dims, strict=True)]
        boxes = x.reshape([n for size, by in zip(local, dims, strict=True) for n in (*map(mesh.degree, by), size)])
        at = [axis for by in dims for axis in (*by, "")]
        order = [*map(at.index, mesh.names), *(place for place, axis in enumerate(at) if not axis)]
        rows = boxes.permute(order).clone(memory_format=torch.contiguous_format).view([mesh.world_size, *local])
        return redistribute(rows, over, source.placements(mesh)[:1], [Shard(0)], list(rows.shape)).squeeze(0)
    rows = redistribute(x.unsqueeze(0), over, [Shard(0)], [Replicate()], [mesh.world_size, *x.shape])
    order = [place for d, by in enumerate(dims) for place in (*map(mesh.names.index, by), axes + d)]
    boxes = rows.view([*degrees, *x.shape]).permute(order).clone(memory_format=torch.contiguous_format)
    return boxes.view([size * mesh.size(by) for size, by in zip(x.shape, dims, strict=True)])


def _by_pieces(
    x: torch.Tensor,
    source: Sharding,
    target: Sharding,
    shape: tuple[Size, ...],
    mesh: Mesh,
    rank: int,
    over: DeviceMesh,
) -> torch.Tensor:
    """Change dims piece by piece: in parts, in unequal shares, or in those that several axes deal, unlike one axis."""
    ranks = [mesh.coordinate(other) for other in range(mesh.world_size)]
    before = [d for d, dim in enumerate(source.dims) if dim.axes]
    own = [_cut(x, target, mesh, other) for other in ranks]
    if not before:
        most = _most([part.shape for part in own])
        rows = torch.stack([_pad_to(part, most) for part in own])
        received = redistribute(rows, over, source.placements(mesh)[:1], [Shard(0)], list(rows.shape)).squeeze(0)
        return _trim(received, own[rank].shape).clone(memory_format=torch.contiguous_format)
    shapes = [
        [local if isinstance(size, int) else here for size, local, here in zip(shape, locals, x.shape, strict=True)]
        for locals in (source.local_shape(shape, mesh, other) for other in ranks)
    ]
    if any(dim.axes for dim in target.dims):
        (dim,) = before
        pieces = _exchange(own, dim, [each[dim] for each in shapes], rank, over.get_group(0).group_name)
    else:
        padded = _pad_to(x, _most(shapes)).unsqueeze(0)
        rows = redistribute(padded, over, [Shard(0)], [Replicate()], [mesh.world_size, *padded.shape[1:]])
        pieces = [_trim(rows.select(0, other), each) for other, each in enumerate(shapes)]
    return _join(pieces, source, shape, mesh)


def _cut(x: torch.Tensor, target: Sharding, mesh: Mesh, here: Mapping[str, int]) -> torch.Tensor:
    for dim, by in enumerate(target.dims):
        x = cut_dim(x, dim, by, mesh, here)
    return x


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


def _pad_to(x: torch.Tensor, shape: Sequence[Size]) -> torch.Tensor:
    for dim, size in enumerate(shape):
        x = _pad(x, dim, size) if isinstance(size, int) else x
    return x


def _trim(x: torch.Tensor, shape: Sequence[Size]) -> torch.Tensor:
    for dim, size in enumerate(shape):
        x = x.narrow(dim, 0, size) if isinstance(size, int) and x.shape[dim] != size else x
    return x


def _all_to_all(
    x: torch.Tensor, before: int, after: int, shape: Sequence[Size], mesh: Mesh, rank: int, group: str
) -> torch.Tensor:
    """Send each rank its part of dim `after`; receive our part of everyone's rows of dim `before`."""
    parts, rows = (
        [chunk(shape[dim], mesh.world_size, other)[1] for other in range(mesh.world_size)] for dim in (after, before)
    )
    return torch.cat(_exchange(torch.split(x, parts, dim=after), before, rows, rank, group), dim=before)


def _into_spans(x: torch.Tensor, source: Sharding, target: Sharding, rank: int, group: str) -> torch.Tensor:
    """Send each rank the elements of its span that it lacks, and put the own ones between those that others send."""
    (dim,) = (dim for dim, by in enumerate(target.dims) if by.spans)
    have, want = ([range(*span) for span in end.dims[dim].spans] for end in (source, target))
    ranks, own = range(len(have)), have[rank]

    def lacks(sender: int, receiver: int) -> range:
        return overlap(have[sender], want[receiver]) if sender != receiver else range(0)

    def part(run: range) -> torch.Tensor:
        return x.narrow(dim, run.start - own.start if run else 0, len(run))

    kept = overlap(own, want[rank])
    if not any(lacks(a, b) for a in ranks for b in ranks):
        return part(kept).clone(memory_format=torch.contiguous_format)
    row = _numel([size for at, size in enumerate(x.shape) if at != dim])
    senders = [other for other in ranks if lacks(other, rank)] or [rank]  # a rank that gets nothing gets no rows
    sent = [part(run).reshape(-1) for other in ranks if (run := lacks(rank, other))] or [part(range(0)).reshape(-1)]
    sizes_out, sizes_in = (
        [row * len(lacks(*pair)) for pair in pairs]
        for pairs in (
            [(other, rank) for other in ranks],
            [(rank, other) for other in ranks],
        )
    )
    flat = c10d_functional.all_to_all_single(torch.cat(sent), sizes_out, sizes_in, group)
    flat = c10d_functional.wait_tensor(flat)
    received = torch.split(flat, [sizes_out[other] for other in senders]) if senders[1:] else [flat]
    pieces = [(rank, part(kept))] if kept else []
    for other, piece in zip(senders, received, strict=True):
        pieces.append((other, piece.reshape([*x.shape[:dim], len(lacks(other, rank)), *x.shape[dim + 1 :]])))
    pieces.sort(key=lambda pair: have[pair[0]].start)
    return torch.cat([piece for _, piece in pieces], dim)


def _exchange(
    sent: Sequence[torch.Tensor], before: int, rows: Sequence[Size], rank: int, group: str
) -> list[torch.Tensor]:
    """Return the tensors that all ranks send to this one, each with its own number of rows of dim `before`."""
    shapes_in = [[*sent[rank].shape[:before], size, *sent[rank].shape[before + 1 :]] for size in rows]
    sizes_out = [_numel(piece) for piece in shapes_in]
    flat = torch.cat([piece.reshape(-1) for piece in sent])
    flat_in = c10d_functional.all_to_all_single(flat, sizes_out, [_numel(piece.shape) for piece in sent], group)
    flat_in = c10d_functional.wait_tensor(flat_in)
    return [p.reshape(piece) for p, piece in zip(torch.split(flat_in, sizes_out), shapes_in, strict=True)]


def _numel(shape: Sequence[Size]) -> Size:
    total: Size = 1
    for size in shape:
        total = total * size
    return total
