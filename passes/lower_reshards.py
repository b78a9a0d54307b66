"""Replace every reshard by the collectives that make it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Replicate, Shard

from tpcompiler._torch import DeviceMesh, FakeTensorMode, fake_group, make_fx, redistribute, traced_mesh
from tpcompiler.ir import edit
from tpcompiler.ir.local import fake_mode_of, is_contiguous, key, local_value, memory_order
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.program import GLOBAL, MARK, ORIGIN, RESHARD, LoweredProgram, Reshard, ReshardedProgram, reshard
from tpcompiler.ir.sharding import WHOLE, DimSharding, Sharding, Size, chunk

Traces = dict[Any, fx.Graph]

_serial = itertools.count()


def lower_reshards(program: ReshardedProgram, rank: int, traces: Traces) -> LoweredProgram:
    """Replace each `reshard` by the subgraph that torch's own `redistribute_local_tensor` makes on this rank.

    Before    reshard: R = reshard(y)               y: P(sum)
    After     all_reduce = all_reduce(y, 'sum', 'tp=2:tp')
              wait_tensor: R = wait_tensor(all_reduce)

    Equal changes of equal local shapes at the same place of the mesh are traced once; `traces` keeps them from rank to
    rank. S(i) -> S(j) is an all_to_all of our own, because torch's asks for the caller's rank and gathers on CPU.
    """
    graph = edit.copy_graph(program.graph)
    mode = fake_mode_of(graph)
    for node in edit.calls(graph):
        if node.target is not reshard:
            continue
        change: Reshard = node.meta[RESHARD]
        (value,) = edit.operands(node)
        body = _trace(value.meta["val"], change, program.mesh, rank, mode, traces)
        meta = {MARK: node.meta[MARK], ORIGIN: value.name, GLOBAL: value.meta["val"]}
        made = edit.graft(node, body, [value], {RESHARD: change})
        if made:
            made[-1].meta.update(meta)
    return LoweredProgram(program.source, graph, program.mesh, rank)


def _trace(
    value: torch.Tensor, change: Reshard, mesh: Mesh, rank: int, mode: FakeTensorMode, traces: Traces
) -> fx.Graph:
    coordinate = mesh.coordinate(rank)
    local = local_value(value, change.source, mesh, coordinate, mode)
    dense = is_contiguous(value)
    order = list(range(value.ndim)) if dense else memory_order(value)
    steps = [(begin.permuted(order), end.permuted(order)) for begin, end in _steps(change)]
    shape = tuple(value.shape[dim] for dim in order)
    known = (change.source, change.target, key(value), dense, key(local), _position(change, value, mesh, rank))
    if known not in traces:
        with mode:
            local = torch.empty(local.shape, dtype=local.dtype, device=local.device)
        name = f"tpcompiler_trace_{next(_serial)}"
        (axis,) = mesh.names
        here = coordinate[axis]
        with fake_group(name, here, mesh.degree(axis), local.device.type):
            over = traced_mesh(local.device.type, mesh.names, [mesh.degree(axis)], here, [name])

            def body(x: torch.Tensor) -> torch.Tensor:
                # Collectives read memory in order: the dims are changed as they lie there, and lie so again after it.
                x = _permuted(x, order)
                x = x if dense else x.clone(memory_format=torch.contiguous_format)
                for source, target in steps:
                    if source.is_replicated and change.held_by_first(x.dtype):
                        x = _held_by_first(x, target, here)
                    else:
                        x = _change(x, source, target, _global_shape(x, shape, source, mesh), mesh, rank, over)
                return _permuted(x, [order.index(dim) for dim in range(x.ndim)])

            with mode, torch.no_grad():
                graph = make_fx(body, tracing_mode="real")(local).graph
        for node in graph.nodes:
            node.args = tuple(_rename(arg, name, mesh) for arg in node.args)
        traces[known] = graph
    return traces[known]


def _permuted(x: torch.Tensor, order: list[int]) -> torch.Tensor:
    return x if order == sorted(order) else x.permute(order)


def _position(change: Reshard, value: torch.Tensor, mesh: Mesh, rank: int) -> Any:
    """What of the rank the traced graph depends on."""
    axes = change.source.axes | change.target.axes
    here = {a: c for a, c in mesh.coordinate(rank).items() if a in axes}
    even = change.source.is_even(value.shape, mesh) and change.target.is_even(value.shape, mesh)
    return None if even and not change.cuts_a_whole(value.dtype) else tuple(here.items())


def _rename(arg: Any, name: str, mesh: Mesh) -> Any:
    return mesh.group_name(mesh.names[0]) if isinstance(arg, str) and arg == name else arg


def _steps(change: Reshard) -> list[tuple[Sharding, Sharding]]:
    between = Sharding.replicated(change.source.ndim)
    if change.through_whole:
        return [(change.source, between), (between, change.target)]
    return [(change.source, change.target)]


def _global_shape(x: torch.Tensor, shape: Sequence[Size], source: Sharding, mesh: Mesh) -> tuple[Size, ...]:
    """The global shape, its symbolic sizes computed from the local tensor, as the traced graph must."""
    return tuple(
        size if isinstance(size, int) else x.shape[d] * math.prod(mesh.degree(axis) for axis in source.dims[d].axes)
        for d, size in enumerate(shape)
    )


def _change(
    x: torch.Tensor,
    source: Sharding,
    target: Sharding,
    shape: tuple[Size, ...],
    mesh: Mesh,
    rank: int,
    over: DeviceMesh,
) -> torch.Tensor:
    here = mesh.coordinate(rank)
    local_target = target.local_shape(shape, mesh, here)
    ways = [a if a.axes else b for a, b in zip(source.dims, target.dims, strict=True)]
    apart = any(way.unit > 1 or way.block for way in ways)
    if apart:
        # For torch, a dim of blocks that are dealt in units is three: of blocks, of units, and of a unit's elements.
        counts = [size // way.block if way.block else 1 for size, way in zip(shape, ways, strict=True)]
        held = [
            replace(way, axes=dim.axes).share(size, mesh, here)[1] if way.block else size
            for dim, way, size in zip(source.dims, ways, x.shape, strict=True)
        ]
        x = x.reshape(_apart(held, counts, ways))
        shape = tuple(_apart([way.block or size for way, size in zip(ways, shape, strict=True)], counts, ways))
        source, target = _by_unit(source, ways), _by_unit(target, ways)
    before = [d for d, dim in enumerate(source.dims) if dim.axes]
    after = [d for d, dim in enumerate(target.dims) if dim.axes]
    if before and after and before != after:
        x = _all_to_all(x, before[0], after[0], shape, mesh, rank, over.get_group(0).group_name)
    else:
        x = _over_even_shards(x, source, target, shape, mesh, rank, over)
    return x.reshape(local_target) if apart else x


def _held_by_first(x: torch.Tensor, target: Sharding, here: int) -> torch.Tensor:
    """The value on the first rank, and on the others what adds (multiplies) nothing to it."""
    ((_, op),) = target.partial
    return torch.full_like(x, 1 if op == "product" else 0) if here else x.clone()


def _over_even_shards(
    x: torch.Tensor,
    source: Sharding,
    target: Sharding,
    shape: tuple[Size, ...],
    mesh: Mesh,
    rank: int,
    over: DeviceMesh,
) -> torch.Tensor:
    """torch's own change, with a dim that a collective works on padded to even shards and cut again.

    torch pads uneven shards by itself, but in a way that makes the example's sizes of dynamic dims fixed.
    """
    (axis,) = mesh.names
    gathered = [d for d, dim in enumerate(source.dims) if dim.axes and not target.dims[d].axes]
    scattered = [d for d, dim in enumerate(target.dims) if dim.axes and source.partial]
    sliced = [d for d, dim in enumerate(target.dims) if dim.axes and source.is_replicated]
    dynamic = any(not isinstance(shape[d], int) for d in gathered + scattered + sliced)
    padded, wanted = list(shape), list(target.local_shape(shape, mesh, mesh.coordinate(rank)))
    for dim in gathered + scattered if not dynamic else ():
        step = chunk(shape[dim], mesh.degree(axis), 0)[1]
        padded[dim] = step * mesh.degree(axis)
        x = _pad(x, dim, step if dim in gathered else padded[dim])
    if sliced and dynamic:
        # A view in one row per rank raises on a size that is no multiple of the degree; a slice would drop the rest.
        (dim,) = sliced
        rows = _rows(x, dim, mesh.degree(axis))
        x = rows.select(dim, mesh.coordinate(rank)[axis]).clone(memory_format=torch.contiguous_format)
    elif scattered and dynamic:
        # Scattered as a first dim of one row per rank: torch would chunk a dynamic size, and guard on it.
        (dim,) = scattered
        rows = _rows(x, dim, mesh.degree(axis)).movedim(dim, 0)
        rows = rows.clone(memory_format=torch.contiguous_format)
        x = redistribute(rows, over, source.placements(mesh), [Shard(0)], list(rows.shape)).squeeze(0)
    elif gathered and (gathered[0] > 0 or dynamic):
        # Gathered as a new first dim and moved into place: torch would split by a dynamic size, and guard on it.
        (dim,) = gathered
        whole = [mesh.degree(axis), *x.shape]
        x = redistribute(x.unsqueeze(0), over, [Shard(0)], [Replicate()], whole)
        x = (x.movedim(0, dim).clone(memory_format=torch.contiguous_format) if dim else x).view(padded)
    else:
        x = redistribute(x, over, source.placements(mesh), target.placements(mesh), padded)
    for dim in gathered + scattered if not dynamic else ():
        if x.shape[dim] != wanted[dim]:
            x = x.narrow(dim, 0, wanted[dim]).clone(memory_format=torch.contiguous_format)
    return x


def _rows(x: torch.Tensor, dim: int, degree: int) -> torch.Tensor:
    """A dim as `degree` equal rows of a dim of their own."""
    return x.reshape([*x.shape[:dim], degree, x.shape[dim] // degree, *x.shape[dim + 1 :]])


def _pad(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    missing = size - x.shape[dim]
    if not missing:
        return x
    return torch.cat([x, x.new_zeros([missing if d == dim else s for d, s in enumerate(x.shape)])], dim)


def _apart(sizes: Sequence[Size], counts: Sequence[Size], ways: Sequence[DimSharding]) -> list[Size]:
    """Every size of (a block of) a dim as the dims of its blocks, its units and a unit's elements."""
    out: list[Size] = []
    for size, count, way in zip(sizes, counts, ways, strict=True):
        out += [count] * bool(way.block) + ([size // way.unit, way.unit] if way.unit > 1 else [size])
    return out


def _by_unit(sharding: Sharding, ways: Sequence[DimSharding]) -> Sharding:
    dims: list[DimSharding] = []
    for dim, way in zip(sharding.dims, ways, strict=True):
        dims += [WHOLE] * bool(way.block) + [DimSharding(dim.axes)] + [WHOLE] * (way.unit > 1)
    return Sharding(tuple(dims), sharding.partial)


def _all_to_all(
    x: torch.Tensor, before: int, after: int, shape: Sequence[Size], mesh: Mesh, rank: int, group: str
) -> torch.Tensor:
    """Send each rank its part of dim `after`, receive our part from everyone's rows of dim `before`."""
    (axis,) = mesh.names
    degree, here = mesh.degree(axis), mesh.coordinate(rank)[axis]
    parts = [chunk(shape[after], degree, other)[1] for other in range(degree)]
    rows = [chunk(shape[before], degree, other)[1] for other in range(degree)]
    sent = torch.split(x, parts, dim=after)
    received = []
    for other in range(degree):
        piece = list(x.shape)
        piece[before], piece[after] = rows[other], parts[here]
        received.append(piece)
    sizes_out = [_numel(piece) for piece in received]
    flat = torch.cat([piece.reshape(-1) for piece in sent])
    got = torch.ops._c10d_functional.all_to_all_single(flat, sizes_out, [_numel(piece.shape) for piece in sent], group)
    got = torch.ops._c10d_functional.wait_tensor(got)
    pieces = [p.reshape(piece) for p, piece in zip(torch.split(got, sizes_out), received, strict=True)]
    return torch.cat(pieces, dim=before)


def _numel(shape: Sequence[Size]) -> Size:
    total: Size = 1
    for size in shape:
        total = total * size
    return total
