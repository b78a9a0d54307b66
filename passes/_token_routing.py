"""Find the routes of tokens through experts: rows are sorted by expert, multiplied, and put back in their order."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from tpcompiler._torch import aten, sym_hint, tree_map
from tpcompiler.ir import edit
from tpcompiler.ir.sizes import statically_equal
from tpcompiler.passes.regions.spread_experts import find_grouped
from tpcompiler.rules.index_range import SAME_VALUES
from tpcompiler.rules.registry import rule_of

SORTS = (aten.sort.default, aten.sort.stable, aten.argsort.default, aten.argsort.stable)
TRIALS = 3  # random choices of experts on which integers are compared


class RowSource(NamedTuple):
    """Sorted rows that a look-up takes from a value: `each` of its rows `repeats` times, or, at 0, a row per expert."""

    value: fx.Node
    repeats: int


@dataclass(frozen=True)
class Route:
    """Rows that are sorted by their expert, multiplied with its matrices, and put back in their order.

    Attributes:
        ids: the expert of each row: [rows].
        experts: their number.
        end: the op that puts rows back: a look-up, or `index_add` of the rows of each token.
        last: its operand with sorted rows.
        repeats: the rows that `end` adds; 0 for a look-up.
        steps: the ops on sorted rows, in order; `calls` are the grouped matmuls among them.
        sources: the look-ups that the steps take rows from.
    """

    ids: fx.Node
    experts: int
    end: fx.Node
    last: fx.Node
    repeats: int
    calls: list[fx.Node]
    steps: list[fx.Node]
    sources: Mapping[fx.Node, RowSource]

    @property
    def rows(self) -> Any:
        return edit.shape(self.ids)[0]

    @property
    def chosen(self) -> int:
        """Return how many different experts each token has in a row, 1 if they may be equal."""
        node = self.ids
        while node.target in SAME_VALUES or node.target is aten._to_copy.default:
            (node,) = edit.operands(node)
        source, at = edit.producer(node)
        is_last = source.target is aten.topk.default and edit.bound(source)["dim"] in (-1, edit.ndim(node) - 1)
        return int(edit.shape(node)[-1]) if is_last and at == 1 else 1


def find_routes(graph: fx.Graph) -> Iterator[Route]:
    """Yield the routes of a graph.

    Integers that depend on the experts alone, such as where each expert's rows end, count as what they are if they are
    that for random experts.
    """
    for calls in find_grouped(graph).values():
        sort = next((node for node in edit.nodes_behind(edit.operands(calls[0])[0]) if node.target in SORTS), None)
        experts = edit.shape(edit.operands(calls[0])[1])[0]
        if sort is None or edit.ndim(edit.operands(sort)[0]) != 1 or not isinstance(experts, int):
            continue
        finder = _Finder(calls, sort, experts)
        if finder.sorts and (route := finder.find()) is not None:
            yield route


class _Finder:
    """The search for the route of some grouped matmuls. `trials`: values of the integers for some random experts."""

    def __init__(self, calls: list[fx.Node], sort: fx.Node, experts: int) -> None:
        self.calls, self.sort, self.ids, self.experts = calls, sort, edit.operands(sort)[0], experts
        self.count = sym_hint(edit.shape(self.ids)[0])
        self.steps: dict[fx.Node, None] = {}
        self.sources: dict[fx.Node, RowSource] = {}
        self.trials: list[dict[fx.Node, Any]] = []
        draw = torch.Generator().manual_seed(0)
        for _ in range(TRIALS):
            chosen = torch.randint(experts, (self.count,), generator=draw)
            self.trials.append({self.ids: chosen.to(edit.fake(self.ids).dtype)})
        sorts = [_value(sort, trial) for trial in self.trials]  # among equal experts, in any order
        self.orders: list[torch.Tensor] = [made if edit.is_tensor(sort) else made[1] for made in sorts]

    @property
    def sorts(self) -> bool:
        """True if rows are sorted by expert, and the matmuls' groups end where the experts' rows do."""
        chosen = [trial[self.ids].long() for trial in self.trials]
        ends = [torch.bincount(each, minlength=self.experts).cumsum(0) for each in chosen]
        is_rising = all((each[order].diff() >= 0).all() for each, order in zip(chosen, self.orders, strict=True))
        return self.count > 1 and is_rising and self._is(edit.operands(self.calls[0])[2], ends)

    def find(self) -> Route | None:
        rows = {self.calls[-1]}
        for node in _after(self.calls[-1]):
            taken = rows.intersection(node.all_input_nodes)
            if not taken:
                continue
            if (repeats := self._puts_back(node)) is not None:
                last = next(iter(taken))
                is_complete = self._visit(last) and self.steps.keys() >= {*self.calls, *rows}
                inner = self.steps.keys()
                if not is_complete or any(u is not node and u not in inner for step in inner for u in step.users):
                    return None
                steps = [each for each in node.graph.nodes if each in inner]
                return Route(self.ids, self.experts, node, last, repeats, self.calls, steps, self.sources)
            if node.op == "output":
                return None
            rows.add(node)
        return None

    def _puts_back(self, node: fx.Node) -> int | None:
        """Return how many rows an op adds where it puts rows back; 0 for a look-up, None for another op."""
        if (index := _row_index(node)) is not None:
            inverse = [order.argsort() for order in self.orders]
            return 0 if self._is(index, inverse) else None
        if node.target is aten.index_add.default and edit.arguments(node).dim == 0:
            base, index, rows = edit.operands(node)
            times = self._times(base)
            is_added = times and edit.arguments(node).alpha == 1 and edit.ndim(rows) == edit.ndim(base)
            return times if is_added and self._is(index, [order // times for order in self.orders]) else None
        return None

    def _visit(self, node: fx.Node) -> bool:
        """Add a value of sorted rows, and those that it is computed from; False if it is not computed row by row."""
        if node in self.steps or node in self.sources:
            return True
        if (source := self._source(node)) is not None:
            self.sources[node] = source
            return True
        if node.target is operator.getitem:
            is_found = self._visit(node.args[0])  # type: ignore[arg-type]
        elif node in self.calls:
            is_found = self._visit(edit.operands(node)[0])
        else:
            own = row_operands(node)
            is_found = bool(own) and all(map(self._visit, own))
        self.steps[node] = None
        return is_found

    def _source(self, node: fx.Node) -> RowSource | None:
        """Return where a look-up by sorted rows takes them from."""
        if (index := _row_index(node)) is None:
            return None
        value = edit.operands(node)[0]
        times = self._times(value)
        if times and self._is(index, [order // times for order in self.orders]):
            return RowSource(value, times)
        is_table = edit.shape(value)[0] == self.experts
        ids = [trial[self.ids][order] for trial, order in zip(self.trials, self.orders, strict=True)]
        return RowSource(value, 0) if is_table and self._is(index, ids) else None

    def _times(self, value: fx.Node) -> int:
        """Return how many sorted rows there are for each row of a value; 0 if they are no multiple."""
        count, rows = edit.shape(value)[0], edit.shape(self.ids)[0]
        times = self.count // max(1, sym_hint(count))
        return times if times and statically_equal(count * times, rows) else 0

    def _is(self, node: fx.Node, wanted: list[torch.Tensor]) -> bool:
        """Return True if a value is this one in each of the trials."""
        try:
            values = [_value(node, trial) for trial in self.trials]
        except _Unknown:
            return False
        return all(torch.equal(value.long(), each.long()) for value, each in zip(values, wanted, strict=True))


def _value(node: fx.Node, known: dict[fx.Node, Any]) -> Any:
    if node not in known:
        if node.op != "call_function":
            raise _Unknown
        if isinstance(edit.fake(node), int | torch.SymInt):
            known[node] = sym_hint(edit.fake(node))
        else:
            for each in node.all_input_nodes:
                _value(each, known)
            args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), known.__getitem__)
            args, kwargs = tree_map(lambda a: "cpu" if isinstance(a, torch.device) else a, (args, kwargs))
            known[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return known[node]


class _Unknown(Exception):
    """The value does not depend on the experts alone."""


def _after(node: fx.Node) -> Iterator[fx.Node]:
    while node.op != "output":
        node = node.next
        yield node


def _row_index(node: fx.Node) -> fx.Node | None:
    """Return the positions, one for each row, by which an op looks rows up."""
    index: Any = None
    if node.target is aten.index.Tensor:
        index = edit.bound(node)["indices"][0] if len(edit.bound(node)["indices"]) == 1 else None
    elif node.target is aten.index_select.default and edit.arguments(node).dim == 0:
        index = edit.arguments(node).index
    is_row = edit.is_tensor(index) and edit.ndim(index) == 1 and not edit.fake(index).is_floating_point()
    return index if is_row and edit.fake(index).dtype != torch.bool else None


def row_operands(node: fx.Node) -> list[fx.Node]:
    """Return the operands of an op that have the rows of its results; none if it does not work row by row."""
    rule = rule_of(node) if edit.outputs(node) else None
    first = {term[:1] for term in rule.pattern.outputs} if rule is not None else set()
    rows = first.pop() if len(first) == 1 else ()
    if rule is None or not rows or not rows[0] or rule.pattern.whole.intersection(rows[0]):
        return []
    pairs = zip(edit.operands(node), rule.pattern.inputs, strict=True)
    return [operand for operand, term in pairs if term[:1] == rows]
