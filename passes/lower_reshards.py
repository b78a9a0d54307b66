"""Replace every reshard by collectives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from tpcompiler._torch import FakeTensorMode, aten, trace_ops
from tpcompiler.cost.path import steps_along
from tpcompiler.ir import edit
from tpcompiler.ir.local import fake_mode_of, is_contiguous, key, local_value, memory_order
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.node_placement import PLACEMENT, NodePlacement, Reshard, origin_of, placement_of, reshard_of
from tpcompiler.ir.program import GLOBAL, LoweredProgram, PlacedProgram, reshard
from tpcompiler.ir.rank_numbers import read_number
from tpcompiler.passes._collectives import Line, change_on_line, numbers_of, put_on_line

Traces = dict[Any, fx.Graph]


def lower_reshards(program: PlacedProgram, ranks: Sequence[int], traces: Traces) -> LoweredProgram:
    """Replace each `reshard` by its collectives, and the ops that divide values into rows and assemble them.

    Before    reshard: R = reshard(y)               y: P(sum)
    After     all_reduce = all_reduce(y, 'sum', 'tp=2:tp')
              wait_tensor: R = wait_tensor(all_reduce)

    Assumes that the ranks hold equal local shapes (`ranks_alike`). Numbers that differ between them, such as where
    their slices begin, are read from `rank_number` nodes, so that one graph serves them all.

    Equal changes of equal local shapes are traced once; `traces` caches them across calls. Even changes on one axis are
    those that torch's DTensor makes, except a gather of an inner dim and S(i) -> S(j), which torch gathers on CPU. A
    maximum or minimum of floats is reduced as integers of the same order (`ir/nan_safe_reduce.py`), because backends
    lose NaN.
    """
    graph = edit.copy_graph(program.graph)
    mode = fake_mode_of(graph)
    lowered: dict[Any, tuple[fx.Graph, list[tuple[int, ...]]]] = {}
    for node in edit.calls(graph):
        if node.target is not reshard:
            continue
        change = reshard_of(node)
        (value,) = edit.operands(node)
        whole = value.meta.get(GLOBAL, edit.fake(value))  # the result of another reshard is already local
        alike = change.source, change.target, key(whole)
        if alike not in lowered:
            steps = lines_of(change, whole, program.mesh, ranks[0])
            body = _trace(whole, change, steps, program.mesh, ranks[0], mode, traces)
            own = [_numbers(lines_of(change, whole, program.mesh, rank)) for rank in ranks] if _numbers(steps) else []
            lowered[alike] = body, list(zip(*own, strict=True))
        body, numbers = lowered[alike]
        readers = [read_number(graph, values, mode) for values in numbers]
        origin = origin_of(value)
        inside = NodePlacement(origin=origin, reshard=change)
        inserted = edit.graft(node, body, [value, *readers], {PLACEMENT: inside})
        if inserted:
            inserted[-1].meta.update({PLACEMENT: replace(placement_of(node), origin=origin), GLOBAL: whole})
    return LoweredProgram(program.source, graph, program.mesh, tuple(ranks))


def lines_of(change: Reshard, value: torch.Tensor, mesh: Mesh, rank: int) -> list[Line]:
    """Return the steps of a change on one rank."""
    order = _order(value)
    steps = steps_along(change.states, value.shape, value.element_size(), mesh)
    assert steps is not None
    return [put_on_line(step, value, mesh, rank, order) for step in steps]


def _order(value: torch.Tensor) -> list[int]:
    return list(range(value.ndim)) if is_contiguous(value) else memory_order(value)


def _numbers(steps: Sequence[Line]) -> list[int]:
    return [number for line in steps for number in numbers_of(line)]


def _trace(
    value: torch.Tensor,
    change: Reshard,
    steps: Sequence[Line],
    mesh: Mesh,
    rank: int,
    mode: FakeTensorMode,
    traces: Traces,
) -> fx.Graph:
    local = local_value(value, change.source, mesh, mesh.coordinate(rank), mode)
    dense, order = is_contiguous(value), _order(value)
    facts = key([line.facts() for line in steps])
    cache_key = (change.source, change.target, key(value), dense, key(local), facts)
    if cache_key in traces:
        return traces[cache_key]
    with mode:
        local = torch.empty(local.shape, dtype=local.dtype, device=local.device)

    def body(x: torch.Tensor, *own: torch.Tensor) -> torch.Tensor:
        # Collectives read memory in order, so dims are put in memory order before the change and back after it.
        x_before, numbers = x, iter(own)
        x = _permute(x, order)
        x = x if dense else x.clone(memory_format=torch.contiguous_format)
        for line in steps:
            x = change_on_line(x, line, numbers)
        x = _permute(x, [order.index(dim) for dim in range(x.ndim)])
        return x.clone() if x is x_before else x  # so that a node can carry this value's facts

    with mode, torch.no_grad():
        own = [torch.empty((), dtype=torch.int64) for _ in _numbers(steps)]
        graph = trace_ops(body, local, *own)
    for node in list(graph.nodes):
        if node.target is aten.detach.default:  # make_fx inserts it after a view in another dtype
            edit.replace_uses(node, node.args[0])
            edit.erase(node)
            continue
        if edit.is_collective(node):
            # make_fx reads sizes off the first tensor that has them, which may not have been waited for.
            (wait,) = filter(edit.is_wait, node.users)
            node.replace_all_uses_with(wait, delete_user_cb=lambda user, wait=wait: user is not wait)
    traces[cache_key] = graph
    return graph


def _permute(x: torch.Tensor, order: list[int]) -> torch.Tensor:
    return x if order == sorted(order) else x.permute(order)
