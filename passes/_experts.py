"""Regions of grouped matmuls over the same groups, such as experts, with the ops between them."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

from tpcompiler._torch import aten
from tpcompiler.ir import edit
from tpcompiler.rules.registry import rule_of

GROUPED = ("aten._grouped_mm.default", "transformers.grouped_mm_fallback.default")


@dataclass
class Region:
    """Matmuls over the same groups and the ops between them; only the last matmul is used elsewhere.

    `rowwise`: the outside operands of the ops between that have one row per token.
    """

    ends: fx.Node
    calls: list[fx.Node]
    between: list[fx.Node]
    rowwise: set[fx.Node]

    @property
    def inner(self) -> set[fx.Node]:
        return {*self.between, *self.calls}

    def tables(self) -> Iterator[tuple[fx.Node, fx.Node, fx.Node]]:
        """Yield the look-ups of one row per expert: (look-up, table, expert index)."""
        for node in self.rowwise:
            indices: Any = edit.bound(node)["indices"] if node.target is aten.index.Tensor else ()
            if len(indices) == 1:
                yield node, edit.operands(node)[0], indices[0]


def find_regions(graph: fx.Graph) -> Iterator[Region]:
    """Yield the regions of grouped matmuls that follow one another row by row."""
    groups: dict[fx.Node, list[fx.Node]] = {}
    for node in edit.calls(graph):
        if str(node.target) in GROUPED and [edit.ndim(o) for o in edit.operands(node)] == [2, 3, 1]:
            groups.setdefault(edit.operands(node)[2], []).append(node)
    for ends, calls in groups.items():
        if (region := _region(ends, calls)) is not None:
            yield region


def leaf_behind(value: fx.Node) -> fx.Node | None:
    """Return the leaf that a value is a rearrangement of, with its first dim unchanged; else None."""
    while value.op == "call_function":
        rule = rule_of(value)
        if rule is None or len(edit.operands(value)) != 1 or rule.pattern.inputs[0][0] != rule.pattern.outputs[0][0]:
            return None
        (value,) = edit.operands(value)
    return value


def _region(ends: fx.Node, calls: list[fx.Node]) -> Region | None:
    nodes = list(_from_to(calls[0], calls[-1]))
    reached, needed = {calls[0]}, set(calls)
    for node in nodes:
        if node in calls or not reached.isdisjoint(node.all_input_nodes):
            reached.add(node)
    for node in reversed(nodes):
        if node in needed and node not in calls:
            needed.update(reached.intersection(node.all_input_nodes))
        elif node in calls:
            needed.update(reached.intersection(edit.operands(node)[:1]))
    between = [node for node in nodes if node in needed and node not in calls]
    inner = {*between, *calls}
    if any(user not in inner for node in inner - {calls[-1]} for user in node.users):
        return None
    rowwise: dict[fx.Node, None] = {}
    for node in between:
        if node.target is operator.getitem:
            continue
        rule, operands = rule_of(node), edit.operands(node)
        if rule is None:
            return None
        first = {operand: term[:1] for operand, term in zip(operands, rule.pattern.inputs, strict=True)}
        rows, *others = {*(first[each] for each in operands if each in inner), *(t[:1] for t in rule.pattern.outputs)}
        if others or not rows or rule.pattern.whole.intersection(*rows):
            return None
        rowwise |= {each: None for each in operands if each not in inner and first[each] == rows}
    return Region(ends, calls, between, set(rowwise))


def _from_to(first: fx.Node, last: fx.Node) -> Iterator[fx.Node]:
    while first is not last:
        yield first
        first = first.next
    yield last
