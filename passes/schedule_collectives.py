"""Start collectives early and wait for them late, so that independent work runs at the same time."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from tpcompiler.ir import edit
from tpcompiler.ir.node_placement import PLACEMENT, NodePlacement
from tpcompiler.ir.program import LocalProgram


def schedule_collectives(program: LocalProgram) -> LocalProgram:
    """Move every wait to just before the first use of its result, and every start to just after its operand.

    Before    h = all_gather(x); hw = wait_tensor(h)          u, v: no part of x
              y = mm(u, v)
              z = mm(hw, y)
    After     h = all_gather(x)
              y = mm(u, v)
              hw = wait_tensor(h)
              z = mm(hw, y)

    The other ops of a change of sharding move along: those before its first start with that, those after its wait with
    the wait. Collectives keep their order, which all ranks share, and all other ops theirs. A start moves up to the
    wait of the collective before it at most, so that one result more is held at a time.

    Assumes that the graph belongs to these ranks alone (`lower_reshards` made it): it is edited in place.
    """
    if any(map(edit.is_collective, program.graph.nodes)):
        late = _wait_late(program.graph)
        edit.reorder(program.graph, _start_early(late))
    return program


def _wait_late(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes in an order in which waits, and the ops of a change after them, stand before their first use."""
    order: list[fx.Node] = []
    held: dict[fx.Node, None] = {}

    def emit(node: fx.Node) -> None:
        for operand in node.all_input_nodes:
            if operand in held:
                del held[operand]
                emit(operand)
        order.append(node)

    after_wait = set[fx.Node]()
    for node in graph.nodes:
        waited = after_wait.intersection(node.all_input_nodes)
        if edit.is_wait(node) or any(_is_same_change(node, value) for value in waited):
            after_wait.add(node)
        if node.op == "output":
            for left in list(held):  # results that nothing uses
                if left in held:
                    del held[left]
                    emit(left)
        if node in after_wait and not edit.is_collective(node):
            held[node] = None
        else:
            emit(node)
    return order


def _start_early(order: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the nodes in an order in which each start, with the ops of its change before it, follows its operand."""
    at = {node: position for position, node in enumerate(order)}
    starts = [node for node in order if edit.is_collective(node)]
    waits = [next((user for user in start.users if edit.is_wait(user)), start) for start in starts]
    groups = [_before_start(start) for start in starts]
    done = dict.fromkeys(node for node in order if node.op == "placeholder")  # first in every exported graph
    next_start = 0
    for node in order:
        done.setdefault(node)
        while next_start < len(starts):
            start, group = starts[next_start], groups[next_start]
            if start not in done:
                wait = waits[next_start - 1] if next_start else None
                if wait is not None and wait not in done and at[wait] < at[start]:
                    break
                needed = {operand for each in group for operand in each.all_input_nodes}.difference(group)
                if not needed <= done.keys():
                    break
                done.update(dict.fromkeys(group))
            next_start += 1
    return list(done)


def _before_start(start: fx.Node) -> list[fx.Node]:
    """Return the ops of a change up to its start, in order; the start alone if it follows another collective."""
    group: dict[fx.Node, None] = {}

    def add(node: fx.Node) -> None:
        for operand in node.all_input_nodes:
            if operand not in group and _is_same_change(operand, start):
                add(operand)
        group[node] = None

    add(start)
    return [start] if any(map(edit.is_wait, group)) else list(group)


def _is_same_change(node: fx.Node, other: fx.Node) -> bool:
    one, two = (_placement(each) for each in (node, other))
    return one is not None and two is not None and one.reshard is not None and one.reshard == two.reshard


def _placement(node: fx.Node) -> NodePlacement | None:
    placement: NodePlacement | None = node.meta.get(PLACEMENT)
    return placement
