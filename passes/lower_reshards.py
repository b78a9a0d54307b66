"""Replace every reshard by the collectives that make it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from passes._collectives import LINE, Line, change_on_line, on_first
from tpcompiler._torch import FakeTensorMode, fake_group, make_fx, traced_mesh
from tpcompiler.cost.path import Step
from tpcompiler.cost.program import differs_by_rank, held_by_first, steps_of
from tpcompiler.ir import edit
from tpcompiler.ir.local import fake_mode_of, is_contiguous, key, local_value, memory_order
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.program import GLOBAL, MARK, ORIGIN, RESHARD, LoweredProgram, Reshard, ReshardedProgram, reshard
from tpcompiler.ir.sharding import WHOLE, DimSharding, Sharding, Size

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
        whole = value.meta.get(GLOBAL, value.meta["val"])  # what is made by another reshard is local already
        body = _trace(whole, change, program.mesh, rank, mode, traces)
        meta = {MARK: node.meta[MARK], ORIGIN: value.meta.get(ORIGIN, value.name), GLOBAL: whole}
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
    known = (change.source, change.target, key(value), dense, key(local), _position(change, value, mesh, rank))
    if known in traces:
        return traces[known]
    with mode:
        local = torch.empty(local.shape, dtype=local.dtype, device=local.device)
    name = f"tpcompiler_trace_{next(_serial)}"
    steps = [
        (_on_a_line(step, value.shape, mesh, rank, order), held_by_first(step, value.dtype))
        for step in steps_of(change, value, mesh)
    ]
    with contextlib.ExitStack() as groups:
        over = {}
        for line, _ in steps:
            group = f"{name}_{'.'.join(line.axes)}"
            if line.axes not in over:
                groups.enter_context(fake_group(group, line.here, line.mesh.world_size, local.device.type))
                degrees = [line.mesh.world_size]
                over[line.axes] = traced_mesh(local.device.type, line.mesh.names, degrees, line.here, [group])

        def body(x: torch.Tensor) -> torch.Tensor:
            # Collectives read memory in order: the dims are changed as they lie there, and lie so again after it.
            given = x
            x = _permuted(x, order)
            x = x if dense else x.clone(memory_format=torch.contiguous_format)
            for line, first in steps:
                x = on_first(x, line) if first else change_on_line(x, line, over[line.axes])
            x = _permuted(x, [order.index(dim) for dim in range(x.ndim)])
            return x.clone() if x is given else x  # so that there is a node to say what this value is from here on

        with mode, torch.no_grad():
            graph = make_fx(body, tracing_mode="real")(local).graph
    names = {f"{name}_{'.'.join(axes)}": mesh.group_name(axes) for axes in over}
    for node in graph.nodes:
        node.args = tuple(names.get(arg, arg) if isinstance(arg, str) else arg for arg in node.args)
        if edit.is_collective(node):
            # make_fx reads sizes off the first tensor that has them, which nobody has waited for yet.
            (wait,) = filter(edit.is_wait, node.users)
            node.replace_all_uses_with(wait, delete_user_cb=lambda user, wait=wait: user is not wait)
    traces[known] = graph
    return graph


def _permuted(x: torch.Tensor, order: list[int]) -> torch.Tensor:
    return x if order == sorted(order) else x.permute(order)


def _position(change: Reshard, value: torch.Tensor, mesh: Mesh, rank: int) -> Any:
    """What of the rank the traced graph depends on."""
    axes = change.source.axes | change.target.axes
    here = {a: c for a, c in mesh.coordinate(rank).items() if a in axes}
    return tuple(here.items()) if differs_by_rank(change, value, mesh) else None


def _on_a_line(step: Step, shape: Sequence[Size], mesh: Mesh, rank: int, order: list[int]) -> Line:
    """The step, and what its group holds together, with the dims in `order`."""
    coordinate = mesh.coordinate(rank)
    line = Mesh(((LINE, mesh.size(step.axes)),))
    ends, sizes = [], list(shape)
    for state in (step.source, step.target):
        dims = []
        for dim, (cut, size) in enumerate(zip(state.dims, shape, strict=True)):
            held, by = _along(cut, size, step.axes, mesh, coordinate)
            dims.append(by)
            if by.axes or state is step.source:
                sizes[dim] = held
        partial = tuple((LINE, op) for axis, op in state.partial if axis == step.axes[0])
        ends.append(Sharding(tuple(dims), partial).permuted(order))
    made = tuple(sizes[dim] for dim in order)
    return Line(step.kind, step.axes, ends[0], ends[1], made, line, mesh.index(step.axes, rank))


def _along(
    cut: DimSharding, size: Size, axes: tuple[str, ...], mesh: Mesh, here: Mapping[str, int]
) -> tuple[Size, DimSharding]:
    """What of a dim the ranks of one group over these axes hold together, and how they cut it."""
    if cut.parts:
        parts = [_along(how, length, axes, mesh, here) for length, how in cut.parts]
        return sum(length for length, _ in parts), DimSharding.of_parts(parts)
    if axes[0] not in cut.axes:
        return cut.local_size(size, mesh, here), WHOLE
    outer = cut.axes.index(axes[0])
    count, piece = 1, size
    for _, count, piece in DimSharding(cut.levels[:outer]).pieces(size, mesh, here):  # noqa: B007  (the last of them)
        pass
    _, block, unit = cut.levels[outer]
    nested = any(level.block for level in cut.levels[:outer])
    return count * piece, DimSharding.by(LINE, block=block or (piece if nested else 0), unit=unit)
