"""Find the matmuls of experts and the route of tokens to them and back, and run them rank by rank on real rows.

Rows are sorted by their expert, multiplied with its matrices, and put back in their order.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from tpcompiler._torch import aten, sym_hint, tree_map
from tpcompiler.errors import PlanError
from tpcompiler.ir import edit
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.sizes import statically_equal
from tpcompiler.rules.experts import BY_BLOCK
from tpcompiler.rules.index_range import SAME_VALUES
from tpcompiler.rules.registry import rule_of

GROUPED = ("aten._grouped_mm.default", "transformers.grouped_mm_fallback.default")
SORTS = (aten.sort.default, aten.sort.stable, aten.argsort.default, aten.argsort.stable)
TRIALS = 3  # random choices of experts on which integers are compared


class RowSource(NamedTuple):
    """Sorted rows that come from a value: each of its rows `repeats` times, or, at 0, a row per expert.

    `experts`: of a row per expert, the expert of each sorted row, or None where the body knows it.
    """

    value: fx.Node
    repeats: int
    experts: fx.Node | None = None


@dataclass(frozen=True)
class ExpertRows:
    """Grouped matmuls over the same groups, and the ops on their rows.

    Attributes:
        calls: the grouped matmuls.
        steps: the ops on sorted rows, in order, the matmuls among them.
        sources: the values that the steps take rows from.
    """

    calls: list[fx.Node]
    steps: list[fx.Node]
    sources: Mapping[fx.Node, RowSource]

    @property
    def ends(self) -> fx.Node:
        """Return where the rows of each expert end."""
        return edit.operands(self.calls[0])[2]

    @property
    def inputs(self) -> list[fx.Node]:
        """Return the values from outside that the steps read, except the ends of the groups."""
        inner = {*self.steps, *self.sources, *(edit.operands(call)[2] for call in self.calls)}
        read = [value for source in self.sources.values() for value in (source.value, source.experts) if value]
        read += [each for step in self.steps for each in edit.operands(step) if each not in inner]
        return list(dict.fromkeys(read))


@dataclass(frozen=True)
class Route:
    """The way of rows to their experts, and back into their order.

    Attributes:
        rows: what is done with sorted rows; its sources are look-ups.
        ids: the expert of each row: [rows].
        experts: their number.
        end: the op that puts rows back: a look-up, or `index_add` of the rows of each token.
        last: its operand with sorted rows.
        repeats: the rows that `end` adds; 0 for a look-up.
    """

    rows: ExpertRows
    ids: fx.Node
    experts: int
    end: fx.Node
    last: fx.Node
    repeats: int

    @property
    def chosen(self) -> int:
        """Return how many different experts each token has in a row, 1 if they may be equal."""
        node = self.ids
        while node.target in SAME_VALUES or node.target is aten._to_copy.default:
            (node,) = edit.operands(node)
        source, at = edit.producer(node)
        is_last = source.target is aten.topk.default and edit.bound(source)["dim"] in (-1, edit.ndim(node) - 1)
        return int(edit.shape(node)[-1]) if is_last and at == 1 else 1


def find_matmuls(graph: fx.Graph) -> Iterator[ExpertRows]:
    """Yield the grouped matmuls that follow one another row by row, of which only the last is used elsewhere."""
    for calls in _find_grouped(graph):
        depend, node = set(calls), calls[0]
        while node is not calls[-1]:
            node = node.next
            if not depend.isdisjoint(node.all_input_nodes):
                depend.add(node)

        def find_source(node: fx.Node, depend: set[fx.Node] = depend) -> RowSource | None:
            return None if node in depend else RowSource(node, 1)

        if (rows := _trace_rows(calls[-1], calls[-1], calls, find_source)) is not None:
            yield rows


def find_tables(rows: ExpertRows) -> Iterator[tuple[fx.Node, RowSource]]:
    """Yield the look-ups, among the sources, that take each row's expert's row of a table."""
    look_ups = [(node, index) for node in rows.sources if (index := _row_index(node)) is not None]
    if look_ups and (order := _find_order(rows.calls)) is not None:
        for node, index in look_ups:
            source = order.find_source(node)
            if source is not None and not source.repeats:
                yield node, source._replace(experts=index)


def _find_grouped(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """Yield the grouped matmuls whose groups of rows end alike."""
    groups: dict[fx.Node, list[fx.Node]] = {}
    for node in edit.calls(graph):
        if str(node.target) in GROUPED and [edit.ndim(o) for o in edit.operands(node)] == [2, 3, 1]:
            groups.setdefault(edit.operands(node)[2], []).append(node)
    yield from groups.values()


def leaf_behind(value: fx.Node) -> fx.Node | None:
    """Return the leaf that a value is a rearrangement of, with its first dim unchanged; else None."""
    while value.op == "call_function":
        rule = rule_of(value)
        if rule is None or len(edit.operands(value)) != 1 or rule.pattern.inputs[0][0] != rule.pattern.outputs[0][0]:
            return None
        (value,) = edit.operands(value)
    return value


def refuse_uneven(name: str, experts: int, axes: Sequence[str], mesh: Mesh, asked_by: str) -> None:
    """Raise a PlanError if experts cannot be dealt out evenly."""
    ranks = mesh.size(axes)
    if mesh.is_unequal(axes):
        raise PlanError(
            f"'{name}' is of experts, which are dealt out evenly, and {mesh} has unequal shares",
            help="cut the experts inside: gate_up_proj colwise, down_proj rowwise",
            asked_by=asked_by,
        )
    if experts % ranks:
        fits = [str(degree) for degree in range(1, experts + 1) if experts % degree == 0]
        raise PlanError(
            f"'{name}' is of {experts} experts, which cannot be dealt out evenly to {ranks} ranks",
            help=f"use a degree of {', '.join(fits[:-1])} or {fits[-1]}, or cut the experts inside",
            asked_by=asked_by,
        )


def _trace_rows(
    last: fx.Node, end: fx.Node, calls: list[fx.Node], find_source: Callable[[fx.Node], RowSource | None]
) -> ExpertRows | None:
    """Return the ops that compute `last` row by row from sources.

    None if another op or fewer matmuls do, or if another op than `end` uses one of these rows.
    """
    steps, sources = dict[fx.Node, None](), dict[fx.Node, RowSource]()

    def visit(node: fx.Node) -> bool:
        if node in steps or node in sources:
            return True
        if (source := find_source(node)) is not None:
            sources[node] = source
            return True
        if node.target is operator.getitem:
            is_found = visit(node.args[0])  # type: ignore[arg-type]
        elif node in calls:
            is_found = visit(edit.operands(node)[0])
        else:
            own = row_operands(node)
            is_found = bool(own) and all(map(visit, own))
        steps[node] = None
        return is_found

    if not visit(last) or not steps.keys() >= {*calls}:
        return None
    if any(user is not end and user not in steps for step in steps if step is not end for user in step.users):
        return None
    return ExpertRows(calls, [node for node in last.graph.nodes if node in steps], sources)


def find_routes(graph: fx.Graph) -> Iterator[Route]:
    """Yield the routes of a graph.

    Integers that depend on the experts alone, such as where each expert's rows end, count as what they are if they are
    that for random experts.
    """
    for calls in _find_grouped(graph):
        order = _find_order(calls)
        if order is not None and (route := order.find_route()) is not None:
            yield route


def _find_order(calls: list[fx.Node]) -> _Order | None:
    """Return the order of the rows of grouped matmuls, if they are sorted by expert."""
    sort = next((node for node in edit.nodes_behind(edit.operands(calls[0])[:1]) if node.target in SORTS), None)
    experts = edit.shape(edit.operands(calls[0])[1])[0]
    if sort is None or edit.ndim(edit.operands(sort)[0]) != 1 or not isinstance(experts, int):
        return None
    order = _Order(calls, sort, experts)
    return order if order.is_by_expert else None


class _Order:
    """The order of the rows of some grouped matmuls. `trials`: values of the integers for some random experts."""

    def __init__(self, calls: list[fx.Node], sort: fx.Node, experts: int) -> None:
        self.calls, self.sort, self.ids, self.experts = calls, sort, edit.operands(sort)[0], experts
        self.count = sym_hint(edit.shape(self.ids)[0])
        self.trials: list[dict[fx.Node, Any]] = []
        draw = torch.Generator().manual_seed(0)
        for _ in range(TRIALS):
            chosen = torch.randint(experts, (self.count,), generator=draw)
            self.trials.append({self.ids: chosen.to(edit.fake(self.ids).dtype)})
        sorts = [_value(sort, trial) for trial in self.trials]  # among equal experts, in any order
        self.orders: list[torch.Tensor] = [made if edit.is_tensor(sort) else made[1] for made in sorts]

    @property
    def is_by_expert(self) -> bool:
        """True if rows are sorted by expert, and the matmuls' groups end where the experts' rows do."""
        chosen = [trial[self.ids].long() for trial in self.trials]
        ends = [torch.bincount(each, minlength=self.experts).cumsum(0) for each in chosen]
        is_rising = all((each[order].diff() >= 0).all() for each, order in zip(chosen, self.orders, strict=True))
        return self.count > 1 and is_rising and self._is(edit.operands(self.calls[0])[2], ends)

    def find_route(self) -> Route | None:
        node, rows = self.calls[-1], {self.calls[-1]}
        while node.op != "output":
            node = node.next
            taken = rows.intersection(node.all_input_nodes)
            if not taken:
                continue
            if (repeats := self._puts_back(node)) is not None:
                last = next(iter(taken))
                found = _trace_rows(last, node, self.calls, self.find_source)
                if found is None or not rows <= {*found.steps}:
                    return None
                return Route(found, self.ids, self.experts, node, last, repeats)
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

    def find_source(self, node: fx.Node) -> RowSource | None:
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


class NotBatchedError(Exception):
    """An op between matmuls that torch cannot batch, or that takes a size."""


class ExpertRun:
    """The steps of experts on real rows, by rank: [ranks, rows, ..].

    `given`: the values from outside. `places`: sends a value's sorted rows to the ranks of their experts, looks up a
    table's row for each, and knows where there the rows of each expert end, and the share of rows that has an expert.
    """

    def __init__(self, rows: ExpertRows, given: Mapping[fx.Node, Any], places: Any) -> None:
        self.rows, self.given, self.places = rows, given, places
        self.values: dict[fx.Node, Any] = {}

    def by_expert(self, node: fx.Node) -> Any:
        """Return a value of the steps.

        Raises:
            NotBatchedError: torch cannot run an op for all ranks at once.
        """
        if node not in self.values:
            self.values[node] = self.compute(node)
        return self.values[node]

    def compute(self, node: fx.Node) -> Any:
        source = self.rows.sources.get(node)
        if source is not None and source.repeats:
            return self.places.send(self.given[source.value], source.repeats)
        if source is not None:
            experts = None if source.experts is None else self.given[source.experts]
            return self.places.look_up(self.given[source.value], experts)
        if node in self.rows.calls:
            x, weight, _ = edit.operands(node)
            kernel = str(node.target)
            return BY_BLOCK(self.by_expert(x), self.given[weight], self.places.ends, kernel, self.places.used)
        return self.run_step(node, self.by_expert, torch.vmap)

    def run_step(self, node: fx.Node, value_of: Callable[[fx.Node], Any], batch: Callable[[Any], Any]) -> Any:
        """Run an op on rows."""
        if node.target is operator.getitem:
            return value_of(node.args[0])[node.args[1]]  # type: ignore[arg-type]
        rows = list(dict.fromkeys(row_operands(node)))
        if not {*rows, *self.given}.issuperset(node.all_input_nodes):
            raise NotBatchedError(node.name)

        def one(*values: Tensor) -> Any:
            known = {**self.given, **dict(zip(rows, values, strict=True))}
            args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), known.__getitem__)
            return node.target(*args, **kwargs)  # type: ignore[operator]

        values = list(map(value_of, rows))
        try:
            return batch(one)(*values)
        except RuntimeError as error:
            raise NotBatchedError(node.name) from error


def over(index: Tensor, like: Tensor) -> Tensor:
    """Expand [blocks, rows] to [blocks, rows, columns, ..], for `gather`."""
    for _ in range(like.ndim - 2):
        index = index.unsqueeze(-1)
    return index.expand(-1, -1, *like.shape[2:]) if like.ndim > 2 else index
