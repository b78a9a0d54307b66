"""The most bytes of inputs and activations at once, while the ops of a program run in a given order."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import fx

from tpcompiler._torch import OpOverload, sym_hint
from tpcompiler.ir import edit
from tpcompiler.ir.program import LocalProgram, Program, pin
from tpcompiler.runtime.in_place import IN_PLACE


class ValueSizes(NamedTuple):
    """The inputs of a program and the values that it makes, without its leaves.

    Attributes:
        size: the bytes of each value that has memory.
        owner: each value, and each view of one -> the value that has the memory.
    """

    size: Mapping[fx.Node, int]
    owner: Mapping[fx.Node, fx.Node]


def find_peak(
    order: Sequence[fx.Node], values: ValueSizes, besides: Mapping[fx.Node, int] | None = None
) -> tuple[int, fx.Node]:
    """Return the most bytes of values at once, and the op at which that is.

    An input lasts to the end, because it is the caller's, and any other value until its last use. What a collective
    sends lasts until its wait, except for the copy that an all_reduce makes.

    Args:
        besides: bytes that an op takes only while it runs.
    """
    last: dict[fx.Node, fx.Node] = {}
    for node in order:
        for operand in (*node.all_input_nodes, *_sent(node)):
            if operand in values.owner:
                last[values.owner[operand]] = node
    ends: dict[fx.Node, list[fx.Node]] = {}
    for value in values.size:
        if value.op != "placeholder":
            ends.setdefault(last.get(value, value), []).append(value)
    now, most = 0, (0, order[0])
    for node in order:
        now += values.size.get(node, 0)
        most = max(most, (now + (besides or {}).get(node, 0), node), key=lambda pair: pair[0])
        now -= sum(values.size[ended] for ended in ends.get(node, ()))
    return most


def local_values(program: LocalProgram) -> ValueSizes:
    """Return the values of a rank's program, with their bytes at the sizes of the example."""
    leaves, in_place = {node for node, _ in program.leaves()}, set(written_in_place(program))
    size: dict[fx.Node, int] = {}
    owner: dict[fx.Node, fx.Node] = {}
    for node in program.graph.nodes:
        if not edit.outputs(node) or node in leaves or node.op == "output":
            continue
        if is_view(node) or edit.is_wait(node):
            source = node.all_input_nodes[0]
            owner.update({node: owner[source]} if source in owner else {})
        else:
            count = sum(sym_hint(value.numel()) * value.element_size() for value in edit.outputs(node))
            owner[node], size[node] = node, 0 if node in in_place else count
    return ValueSizes(size, owner)


def is_view(node: fx.Node) -> bool:
    """Return True for an op whose result shares its first operand's memory."""
    target: Any = node.target
    return node.op == "call_function" and (
        target in (operator.getitem, pin) or (isinstance(target, OpOverload) and target.is_view)
    )


def written_in_place(program: Program) -> Iterator[fx.Node]:
    """Yield the values that `load` writes into the buffer that they are made of (`runtime/in_place.py`)."""
    names = {fqn: node for node, fqn in program.leaves()}
    for value, fqn in program.written():
        buffer = names.get(fqn)
        if value.target in IN_PLACE and value.args[0] is buffer and buffer is not None and len(buffer.users) == 1:
            yield value


def _sent(node: fx.Node) -> Sequence[fx.Node]:
    if not edit.is_wait(node) or "all_reduce" in str((start := edit.started(node)).target):
        return ()
    return start.all_input_nodes
