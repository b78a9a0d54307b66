"""Let every rank run the experts that it holds, on all tokens."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from tpcompiler._torch import aten, trace_ops, tree_flatten
from tpcompiler.errors import PlanError
from tpcompiler.ir import edit
from tpcompiler.ir.draws import remove_unused
from tpcompiler.ir.experts import BY_BLOCK
from tpcompiler.ir.local import fake_mode_of, no_new_guards
from tpcompiler.ir.program import PlannedProgram
from tpcompiler.rules.registry import rule_of

GROUPED = ("aten._grouped_mm.default", "transformers.grouped_mm_fallback.default")


def spread_experts(program: PlannedProgram) -> PlannedProgram:
    """Give grouped matmuls whose groups the plan cuts a dim of blocks, one for each rank, and the rows of all of them.

    Before    up = grouped_mm(x, w1, ends)               x: [s, k], sorted by expert; w1, w2: S(0) over 2 ranks
              y = grouped_mm(relu(up), w2, ends)
    After     first = where the experts of a block begin: [2, 1]
              up = grouped_mm_by_block(x[(rows + first) % s], w1, own ends)             [2, s, n]
              y = grouped_mm_by_block(relu(up), w2, own ends)                           zeros behind own rows
              y = sum(gather(y, 1, (rows - first) % s), 0)                              [s, k]

    A rank then holds its block alone, and the sum over the blocks is one over the ranks, done where it is small. What
    lies between the matmuls is what `torch.vmap` makes of it. Plain matmuls of experts' weights stay as they are.
    """
    graph = edit.copy_graph(program.graph)
    groups: dict[fx.Node, list[fx.Node]] = {}
    for node in edit.calls(graph):
        if str(node.target) in GROUPED and [o.meta["val"].ndim for o in edit.operands(node)] == [2, 3, 1]:
            groups.setdefault(edit.operands(node)[2], []).append(node)
    with no_new_guards(graph):
        for ends, calls in groups.items():
            counts = {_blocks(program, edit.operands(call)[1]) for call in calls}
            if len(counts) == 1 and (count := counts.pop()) > 1 and (region := _Region.of(program, ends, calls, count)):
                region.write()
    remove_unused(graph)
    return replace(program, graph=graph)


def _blocks(program: PlannedProgram, weight: fx.Node) -> int:
    """Among how many ranks the plan cuts the groups, the first dim of a weight; 1 where it does not.

    Raises:
        PlanError: they do not divide.
    """
    while weight.op == "call_function" and (rule := rule_of(weight)) is not None and len(edit.operands(weight)) == 1:
        if rule.pattern.inputs[0][0] != rule.pattern.outputs[0][0]:
            return 1
        (weight,) = edit.operands(weight)
    seed = program.seeds.get(weight.name) or program.kept.get(weight.name)
    if seed is None:
        return 1
    count, experts = program.mesh.size(seed.sharding.dims[0].axes), weight.meta["val"].shape[0]
    if experts % count:
        fqn = next(fqn for node, fqn in program.leaves() if node.name == weight.name)
        fits = [str(degree) for degree in range(1, experts + 1) if experts % degree == 0]
        raise PlanError(
            f"'{fqn}' is of {experts} experts, which cannot be dealt out evenly to {count} ranks",
            help=f"use a degree of {', '.join(fits[:-1])} or {fits[-1]}, or cut the experts inside",
            asked_by=seed.asked_by,
        )
    return count


@dataclass
class _Region:
    """Matmuls over the same groups, the last of which alone is used elsewhere, and what lies between them.

    `rowwise`: of what the calls between take besides, what has a row for each of theirs. `tables`: of these the
    look-ups of a row for each expert in what the ranks hold by expert: (table, which expert).
    """

    ends: fx.Node
    calls: list[fx.Node]
    count: int
    between: list[fx.Node]
    inputs: list[fx.Node]
    rowwise: set[fx.Node]
    tables: dict[fx.Node, tuple[fx.Node, fx.Node]]

    @classmethod
    def of(cls, program: PlannedProgram, ends: fx.Node, calls: list[fx.Node], count: int) -> _Region | None:
        """None where the matmuls do not follow one another row by row."""
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
            rule, given = rule_of(node), edit.operands(node)
            if rule is None:
                return None
            first = {operand: term[:1] for operand, term in zip(given, rule.pattern.inputs, strict=True)}
            rows, *others = {*(first[each] for each in given if each in inner), *(t[:1] for t in rule.pattern.outputs)}
            if others or not rows or rule.pattern.whole.intersection(*rows):
                return None
            rowwise |= {each: None for each in given if each not in inner and first[each] == rows}
        tables: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}
        for node in rowwise:
            indices: Any = edit.bound(node)["indices"] if node.target is aten.index.Tensor else ()
            if len(indices) == 1 and _blocks(program, table := edit.operands(node)[0]) == count:
                tables[node] = (table, indices[0])
        inputs = [ends, *(operand for node in (*between, *calls) for operand in edit.operands(node))]
        inputs += [node for pair in tables.values() for node in pair]
        outer = [node for node in dict.fromkeys(inputs) if node not in inner and node not in tables]
        return cls(ends, calls, count, between, outer, set(rowwise), tables)

    def write(self) -> None:
        """Put it in the place of the last matmul."""
        last = self.calls[-1]
        with fake_mode_of(last.graph), torch.no_grad():
            values = [torch.empty_like(node.meta["val"]) for node in self.inputs]
            try:
                body = trace_ops(self.run, *values)
            except RuntimeError:
                return  # an op that torch cannot batch
        body.eliminate_dead_code()
        numbers = tree_flatten([(inner.args, inner.kwargs) for inner in body.nodes])[0]
        if not any(isinstance(number, torch.SymInt) for number in numbers):
            edit.graft(last, body, self.inputs, {})

    def run(self, *values: torch.Tensor) -> torch.Tensor:
        given = dict(zip(self.inputs, values, strict=True))
        ends = _in_blocks(given[self.ends], self.count)
        first = torch.cat([torch.zeros_like(ends[:1, -1:]), ends[:-1, -1:]])
        ones = torch.ones_like(given[edit.operands(self.calls[0])[0]][:, 0], dtype=torch.int64)
        rows, number = ones.cumsum(0) - 1, ones.sum()  # of a size that may be dynamic
        own = ends - first
        given |= self._by_block(given, (rows + first) % number)
        for call in self.calls:
            x, weight, _ = edit.operands(call)
            given[call] = BY_BLOCK(self._between(x, given), given[weight], own, str(call.target))
        made = given[self.calls[-1]]
        return made.gather(1, _over((rows - first) % number, made)).sum(0)

    def _by_block(self, given: dict[fx.Node, torch.Tensor], taken: torch.Tensor) -> dict[fx.Node, torch.Tensor]:
        """What has rows, for every block with that block's own rows first."""
        made = {node: given[node][taken] for node in self.inputs if node in self.rowwise | self._entering()}
        for node, (table, which) in self.tables.items():
            own = _in_blocks(given[table], self.count)
            begins = torch.arange(0, given[table].shape[0], own.shape[1], device=own.device)
            row = (given[which][taken] - begins.unsqueeze(1)).clamp(0, own.shape[1] - 1)
            made[node] = own.gather(1, _over(row, own))
        return made

    def _entering(self) -> set[fx.Node]:
        return {edit.operands(call)[0] for call in self.calls}.difference(self.between, self.calls)

    def _between(self, x: fx.Node, given: dict[fx.Node, torch.Tensor]) -> torch.Tensor:
        """A value between matmuls, for every block."""
        if x in given:
            return given[x]
        inner = {*self.calls, *self.rowwise, *self._entering()}
        batched = [node for node in given if node in inner]

        def one(*values: torch.Tensor) -> Any:
            known: dict[fx.Node, Any] = {**given, **dict(zip(batched, values, strict=True))}
            for node in self.between:
                if all(each in known or each.op == "get_attr" for each in node.all_input_nodes):
                    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda each: known[each])
                    known[node] = node.target(*args, **kwargs)  # type: ignore[operator]
            return known[x]

        made: torch.Tensor = torch.vmap(one)(*(given[node] for node in batched))
        return made


def _from_to(first: fx.Node, last: fx.Node) -> Iterator[fx.Node]:
    while first is not last:
        yield first
        first = first.next
    yield last


def _in_blocks(value: torch.Tensor, count: int) -> torch.Tensor:
    return value.view(count, -1, *value.shape[1:])


def _over(index: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """[blocks, rows] -> [blocks, rows, columns], for `gather`."""
    return index.unsqueeze(-1).expand(-1, -1, like.shape[2])
