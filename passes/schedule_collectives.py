"""Start collectives early and wait for them late, so that independent work runs at the same time."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace

from torch import fx

from tpcompiler.cost.peak import find_peak, local_values
from tpcompiler.ir import edit
from tpcompiler.ir.node_placement import PLACEMENT, NodePlacement, nodes_named
from tpcompiler.ir.program import LocalProgram, Note
from tpcompiler.terminal.printed import format_bytes


def schedule_collectives(
    program: LocalProgram, limit: int | None = None, first: LocalProgram | None = None
) -> LocalProgram:
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

    A collective in flight holds its result and what it sends. Where that takes the inputs and activations above `limit`
    bytes, the collectives in flight at the peak stay where they are. A note reports that, and what the others take.

    Assumes that the graph belongs to these ranks alone (`lower_reshards` made it): it is edited in place.

    Args:
        first: the program of the first rank, which holds most: its collectives that stay do so on all ranks.
    """
    starts = [node for node in program.graph.nodes if edit.is_collective(node)]
    if not starts:
        return program
    values, before = local_values(program), list(program.graph.nodes)
    least, _ = find_peak(before, values)
    unmoved = set[fx.Node]() if first is None else {starts[at] for at in first.unmoved}
    while True:
        order = _start_early(_wait_late(program.graph, unmoved), unmoved)
        most, at = find_peak(order, values)
        if first is not None or limit is None or most <= limit or not (more := _in_flight(order, at) - unmoved):
            break
        unmoved |= more
    edit.reorder(program.graph, order)
    notes = []
    if unmoved:
        count = f"{len(unmoved)} of {len(starts)} collectives"
        notes.append(f"waited for at once, because a rank would hold more than its limit of memory: {count}")
    if most > least:
        notes.append(f"a rank holds {format_bytes(most - least)} more at the peak ('{at.name}')")
    positions = tuple(at for at, start in enumerate(starts) if start in unmoved)
    return replace(program, unmoved=positions, notes=tuple(Note("overlap", text) for text in notes))


def _in_flight(order: Sequence[fx.Node], at: fx.Node) -> set[fx.Node]:
    """Return the collectives that have started before the end of an op, and are waited for after it."""
    started = set[fx.Node]()
    for node in order:
        if edit.is_collective(node):
            started.add(node)
        if edit.is_wait(node):
            started.discard(edit.started(node))
        if node is at:
            break
    return started


def _wait_late(graph: fx.Graph, unmoved: Set[fx.Node]) -> list[fx.Node]:
    """Return the nodes in an order in which waits, and the ops of a change after them, stand before their first use."""
    order: list[fx.Node] = []
    held: dict[fx.Node, None] = {}

    def emit(node: fx.Node) -> None:
        placement = _placement(node)
        call = placement.call if placement is not None else None
        # The claim of an op on an empty share names operands that it does not use.
        named = nodes_named(call) if call is not None and held else set[str]()
        for operand in [*node.all_input_nodes, *(each for each in held if each.name in named)]:
            if operand in held:
                del held[operand]
                emit(operand)
        order.append(node)
        for user in node.users:  # what nothing uses, such as a piece of a split, stays within its change
            if user in held and not user.users:
                del held[user]
                emit(user)

    after_wait = set[fx.Node]()
    for node in graph.nodes:
        waited = after_wait.intersection(node.all_input_nodes)
        is_moved = edit.is_wait(node) and edit.started(node) not in unmoved
        if is_moved or any(_is_same_change(node, value) for value in waited):
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


def _start_early(order: Sequence[fx.Node], unmoved: Set[fx.Node]) -> list[fx.Node]:
    """Return the nodes in an order in which each start, with the ops of its change before it, follows its operand."""
    at = {node: position for position, node in enumerate(order)}
    starts = [node for node in order if edit.is_collective(node)]
    waits = [next(iter(edit.waits_of(start)), start) for start in starts]
    groups = [_before_start(start) for start in starts]
    done = dict.fromkeys(node for node in order if node.op == "placeholder")  # first in every exported graph
    next_start = 0
    for node in order:
        done.setdefault(node)
        while next_start < len(starts):
            start, group = starts[next_start], groups[next_start]
            if start not in done:
                wait = waits[next_start - 1] if next_start else None
                if start in unmoved or (wait is not None and wait not in done and at[wait] < at[start]):
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
