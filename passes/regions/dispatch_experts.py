"""Send tokens to the ranks of their experts, and what the experts make of them back, by all_to_all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from tpcompiler._torch import aten
from tpcompiler.errors import PlanError
from tpcompiler.ir import edit
from tpcompiler.ir.program import DISPATCH, AxisRequest, PlannedProgram
from tpcompiler.ir.region import Region, pinned, write_regions
from tpcompiler.ir.sizes import sym_quotient
from tpcompiler.passes._expert_rows import (
    ExpertRun,
    NotBatchedError,
    Route,
    find_routes,
    leaf_behind,
    over,
    refuse_uneven,
)


def dispatch_experts(program: PlannedProgram) -> PlannedProgram:
    """Write requested experts as an exchange of rows between the ranks of tokens and those of experts.

    Before    expert, order = sort(ids)                            x: [t, d] over n ranks; w1, w2: S(0)
              y = grouped_mm(relu(grouped_mm(x[order // k], w1, ends)), w2, ends)
              return y[order.argsort()]
    After     slots = x in slots for each pair of ranks: [n, n, c, d]             S(0), by the rank of the token
              rows = slots.transpose(0, 1), sorted by expert: [n, n * c, d]       S(0), by the rank of the expert
              y = grouped_mm_by_block(relu(grouped_mm_by_block(rows, w1, ends)), w2, ends)
              return y put back into slots, transposed, and looked up by token

    All sizes are fixed: a pair of ranks has slots for all rows that one may have for the other, min(k, experts of a
    rank) for each token.

    Raises:
        PlanError: experts that no rows are sorted by, or that cannot be dealt out evenly, or tokens that cannot.
    """
    served = set[str]()
    written = write_regions(program, partial(_find_regions, program, served))
    for leaf, _ in program.leaves():
        if (asked := leaf.meta.get(DISPATCH)) is not None and leaf.name not in served:
            raise PlanError(
                f"style 'dispatch_experts' does not fit '{program.constraints[leaf.name].leaf}': no grouped matmul "
                "takes it with rows that are sorted by expert and put back in their order",
                help="use 'grouped_gemm', which sends all tokens to all ranks",
                asked_by=asked.asked_by,
            )
    return written


def _find_regions(program: PlannedProgram, served: set[str], graph: fx.Graph) -> Iterator[Region]:
    for route in find_routes(graph):
        weights = [leaf_behind(edit.operands(call)[1]) for call in route.rows.calls]
        asked: list[AxisRequest | None] = [leaf.meta.get(DISPATCH) if leaf is not None else None for leaf in weights]
        request = asked[0]
        if request is None or len({each and each.axis for each in asked}) > 1:
            continue
        summed = edit.operands(route.end)[:1] if route.repeats else []
        inputs = list(dict.fromkeys([route.ids, *route.rows.inputs, *summed]))
        body = partial(_run, route, request, program.mesh.degree(request.axis), inputs)
        _refuse_misfit(program, route, request, weights[0])
        tables = [leaf_behind(source.value) for source in route.rows.sources.values() if not source.repeats]
        served.update(leaf.name for leaf in (*weights, *tables) if leaf is not None)
        whole = (aten.unflatten.int, aten.flatten.using_ints)
        yield Region(route.end, inputs, body, whole, request.asked_by)


def _refuse_misfit(program: PlannedProgram, route: Route, asked: AxisRequest, weight: Any) -> None:
    ranks, name = program.mesh.degree(asked.axis), program.constraints[weight.name].leaf
    refuse_uneven(name, route.experts, [asked.axis], program.mesh, asked.asked_by)
    tokens = [source.value for source in route.rows.sources.values() if source.repeats] or [route.ids]
    for count in (edit.shape(value)[0] for value in tokens):
        if sym_quotient(count, ranks) is None:
            raise PlanError(
                f"the {count} tokens of '{name}' cannot be dealt out evenly to {ranks} ranks",
                help="use 'grouped_gemm', which sends all tokens to all ranks",
                asked_by=asked.asked_by,
            )


def _run(route: Route, asked: AxisRequest, ranks: int, inputs: list[fx.Node], *values: Tensor) -> Any:
    given = dict(zip(inputs, values, strict=True))
    try:
        rows = _Run(route, given, _Slots.of(given[route.ids], route, asked, ranks)).by_token(route.last)
    except NotBatchedError:
        return NotImplemented
    if not route.repeats:
        return rows
    return given[edit.operands(route.end)[0]] + aten.unflatten.int(rows, 0, [-1, route.repeats]).sum(1)


class _Run(ExpertRun):
    """The steps on real rows: `tokens` in the order of the tokens, [rows, ..].

    `inside`: the steps that run at the experts: the matmuls, those between, and those that take a row per expert.
    """

    def __init__(self, route: Route, given: dict[fx.Node, Any], slots: _Slots) -> None:
        super().__init__(route.rows, given, slots)
        self.ids, self.slots, self.inside = route.ids, slots, _find_steps_at_experts(route)
        self.tokens: dict[fx.Node, Any] = {}

    def by_token(self, node: fx.Node) -> Any:
        if node not in self.tokens:
            source = self.rows.sources.get(node)
            if node in self.inside:
                self.tokens[node] = self.slots.put_back(self.by_expert(node))
            elif source is None:
                self.tokens[node] = self.run_step(node, self.by_token, lambda one: one)
            elif source.repeats:
                self.tokens[node] = _repeat(self.given[source.value], source.repeats)
            else:
                self.tokens[node] = self.given[source.value][self.given[self.ids]]
        return self.tokens[node]

    def compute(self, node: fx.Node) -> Any:
        is_at_expert = node in self.inside or node in self.rows.sources
        return super().compute(node) if is_at_expert else self.slots.send(self.by_token(node), 1)


def _find_steps_at_experts(route: Route) -> set[fx.Node]:
    rows, ahead, inside = route.rows, set(route.rows.calls), set(route.rows.calls)
    for step in rows.steps:
        if not ahead.isdisjoint(step.all_input_nodes):
            ahead.add(step)
            if any(each in rows.sources and not rows.sources[each].repeats for each in step.all_input_nodes):
                inside.add(step)
    for step in reversed(rows.steps):
        if step in ahead and not inside.isdisjoint(step.users):
            inside.add(step)
    return inside


@dataclass
class _Slots:
    """The slots of the rows, as many for each pair of ranks.

    Attributes:
        used: the share of them that the experts are expected to multiply.
        row: the row of a rank that is in each of its slots: [ranks, slots].
        slot: the slot that each row of a rank is in: [ranks, rows].
        ends: where the rows of each expert end at its rank: [ranks, experts].
        group: the expert of each row there, which are sorted by it; `order`: the slot of each row.
    """

    axis: str
    ranks: int
    used: float
    row: Tensor
    slot: Tensor
    ends: Tensor
    group: Tensor
    order: Tensor

    @classmethod
    def of(cls, ids: Tensor, route: Route, asked: AxisRequest, ranks: int) -> _Slots:
        own = pinned(aten.unflatten.int(ids, 0, [ranks, -1]), asked.axis, 0)
        each, rows = route.experts // ranks, own.shape[1]
        most = min(route.chosen, each)  # rows of a token that go to one rank
        count = rows // route.chosen * most if most < route.chosen else rows
        at = _Places.of(own, route.experts, ranks)
        in_order = (at.first.unsqueeze(2) + torch.arange(count, device=ids.device)).clamp(max=rows - 1)
        slot = at.group * count + at.place.clamp(max=count - 1)
        row, slot = at.order.gather(1, in_order.flatten(1)), slot.scatter(1, at.order, slot)
        counts = aten.unflatten.int(pinned(at.counts, asked.axis, 0), 1, [ranks, -1])
        theirs = pinned(counts.transpose(0, 1), asked.axis, 0)  # [expert's rank, token's rank, experts of a rank]
        in_pair = torch.arange(count, device=ids.device).view(-1, 1)
        of_slot = (in_pair >= theirs.cumsum(2).unsqueeze(2)).sum(3).flatten(1)  # behind all of them: an empty slot
        there, order = of_slot.sort(dim=1, stable=True)
        ends = theirs.sum(1).cumsum(1, dtype=torch.int32)
        return cls(asked.axis, ranks, route.chosen / (most * ranks), row, slot, ends, there, order)

    def send(self, value: Tensor, repeats: int) -> Tensor:
        own = aten.unflatten.int(value, 0, [self.ranks, -1])
        rows = pinned(own.gather(1, over(_divided(self.row, repeats), own)), self.axis, 0)
        slots = aten.unflatten.int(rows, 1, [self.ranks, -1])
        there = pinned(slots.transpose(0, 1), self.axis, 0)
        rows = there.flatten(1, 2)
        return rows.gather(1, over(self.order, rows))

    def put_back(self, value: Tensor) -> Tensor:
        """Return the rows of the experts in the order of the tokens."""
        inverse = self.order.argsort(1)
        each = aten.unflatten.int(value.gather(1, over(inverse, value)), 1, [self.ranks, -1])
        slots = pinned(each.transpose(0, 1), self.axis, 0).flatten(1, 2)
        return slots.gather(1, over(self.slot, slots)).flatten(0, 1)

    def look_up(self, table: Tensor, experts: Tensor | None) -> Tensor:
        own: Tensor = aten.unflatten.int(table, 0, [self.ranks, -1])
        return own.gather(1, over(self.group.clamp(max=own.shape[1] - 1), own))


class _Places(NamedTuple):
    """The rows of each rank, sorted by expert and so by the expert's rank.

    Attributes:
        order: the row that comes at each place.
        group, place: of each row in this order: its expert's rank, and its place among the rows for that one.
        first: where the rows for each rank begin: [ranks, ranks].
        counts: the rows of each expert: [ranks, experts].
    """

    order: Tensor
    group: Tensor
    place: Tensor
    first: Tensor
    counts: Tensor

    @classmethod
    def of(cls, ids: Tensor, experts: int, ranks: int) -> _Places:
        """Return the places of rows with these experts: [ranks, rows]."""
        expert, order = ids.to(torch.int64).sort(dim=1, stable=True)
        counts = (ids.unsqueeze(2) == torch.arange(experts, device=ids.device)).sum(1, dtype=torch.int32)
        of_groups = aten.unflatten.int(counts, 1, [ranks, -1]).sum(2)
        first, group = of_groups.cumsum(1) - of_groups, _divided(expert, experts // ranks)
        place = torch.arange(ids.shape[1], device=ids.device) - first.gather(1, group)
        return cls(order, group, place, first, counts)


def _repeat(value: Tensor, times: int) -> Tensor:
    return value if times == 1 else value.unsqueeze(1).expand(-1, times, *value.shape[1:]).flatten(0, 1)


def _divided(value: Tensor, by: int) -> Tensor:
    return value if by == 1 else torch.div(value, by, rounding_mode="floor")
