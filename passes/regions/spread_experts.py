"""Let every rank run the experts that it holds, on all tokens."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from tpcompiler._torch import aten
from tpcompiler.errors import PlanError
from tpcompiler.ir import edit
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.program import DISPATCH, PlannedProgram
from tpcompiler.ir.region import Region, write_regions
from tpcompiler.rules.experts import BY_BLOCK
from tpcompiler.rules.registry import rule_of

GROUPED = ("aten._grouped_mm.default", "transformers.grouped_mm_fallback.default")


def spread_experts(program: PlannedProgram) -> PlannedProgram:
    """Give grouped matmuls whose groups the plan shards a dim of blocks, one per rank, and the rows of all blocks.

    Before    up = grouped_mm(x, w1, ends)               x: [s, k], sorted by expert; w1, w2: S(0) over 2 ranks
              y = grouped_mm(relu(up), w2, ends)
    After     first = where the experts of a block begin: [2, 1]
              up = grouped_mm_by_block(x[(rows + first) % s], w1, own ends)             [2, s, n]
              y = grouped_mm_by_block(relu(up), w2, own ends)                           zeros behind own rows
              y = sum(gather(y, 1, (rows - first) % s), 0)                              [s, k]

    A rank then holds its block alone, and the sum over the blocks becomes a sum over the ranks, done where it is small.
    The ops between the matmuls are batched with `torch.vmap`. Plain matmuls of experts' weights stay as they are.
    """
    return write_regions(program, partial(_find_blocks, program))


def _find_blocks(program: PlannedProgram, graph: fx.Graph) -> Iterator[Region]:
    for experts in find_matmuls(graph):
        counts = {_blocks(program, edit.operands(call)[1]) for call in experts.calls}
        if len(counts) == 1 and (count := counts.pop()) > 1:
            body = _SpreadBody.of(program, experts, count)
            yield Region(experts.calls[-1], body.inputs, body.run)


def _blocks(program: PlannedProgram, weight: fx.Node) -> int:
    """Return among how many ranks the plan deals out the groups, the first dim of a weight; 1 if it does not.

    Raises:
        PlanError: the groups cannot be dealt out evenly.
    """
    leaf = leaf_behind(weight)
    constraint = None if leaf is None else program.constraints.get(leaf.name)
    if leaf is None or DISPATCH in leaf.meta or constraint is None or constraint.request is None:
        return 1
    axes = constraint.sharding.dims[0].axes
    refuse_uneven(constraint.leaf, edit.shape(leaf)[0], axes, program.mesh, constraint.asked_by)
    return program.mesh.size(axes)


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


@dataclass
class Experts:
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


def find_matmuls(graph: fx.Graph) -> Iterator[Experts]:
    """Yield the grouped matmuls that follow one another row by row."""
    for ends, calls in find_grouped(graph).items():
        if (experts := _experts(ends, calls)) is not None:
            yield experts


def find_grouped(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Return the grouped matmuls by where their groups of rows end."""
    groups: dict[fx.Node, list[fx.Node]] = {}
    for node in edit.calls(graph):
        if str(node.target) in GROUPED and [edit.ndim(o) for o in edit.operands(node)] == [2, 3, 1]:
            groups.setdefault(edit.operands(node)[2], []).append(node)
    return groups


def leaf_behind(value: fx.Node) -> fx.Node | None:
    """Return the leaf that a value is a rearrangement of, with its first dim unchanged; else None."""
    while value.op == "call_function":
        rule = rule_of(value)
        if rule is None or len(edit.operands(value)) != 1 or rule.pattern.inputs[0][0] != rule.pattern.outputs[0][0]:
            return None
        (value,) = edit.operands(value)
    return value


def _experts(ends: fx.Node, calls: list[fx.Node]) -> Experts | None:
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
    return Experts(ends, calls, between, set(rowwise))


def _from_to(first: fx.Node, last: fx.Node) -> Iterator[fx.Node]:
    while first is not last:
        yield first
        first = first.next
    yield last


@dataclass
class _SpreadBody:
    """The body that replaces a region, for a number of blocks.

    `inputs`: its operands from outside; `by_row`: those with one row per token. `tables`: look-ups in tables that the
    ranks hold by expert: (table, expert index).
    """

    experts: Experts
    count: int
    inputs: list[fx.Node]
    by_row: set[fx.Node]
    tables: dict[fx.Node, tuple[fx.Node, fx.Node]]

    @classmethod
    def of(cls, program: PlannedProgram, experts: Experts, count: int) -> _SpreadBody:
        tables = {node: (table, which) for node, table, which in experts.tables() if _blocks(program, table) == count}
        inputs = [experts.ends]
        inputs += [operand for node in (*experts.between, *experts.calls) for operand in edit.operands(node)]
        inputs += [node for pair in tables.values() for node in pair]
        outer = [node for node in dict.fromkeys(inputs) if node not in experts.inner and node not in tables]
        entering = {edit.operands(call)[0] for call in experts.calls} - experts.inner
        return cls(experts, count, outer, experts.rowwise | entering, tables)

    def run(self, *values: torch.Tensor) -> Any:
        values_of = dict(zip(self.inputs, values, strict=True))
        ends = _in_blocks(values_of[self.experts.ends], self.count)
        first = torch.cat([torch.zeros_like(ends[:1, -1:]), ends[:-1, -1:]])
        ones = torch.ones_like(values_of[edit.operands(self.experts.calls[0])[0]][:, 0], dtype=torch.int64)
        rows, number = ones.cumsum(0) - 1, ones.sum()  # their number may be dynamic
        own = ends - first
        values_of |= self._by_block(values_of, (rows + first) % number)
        for call in self.experts.calls:
            x, weight, _ = edit.operands(call)
            try:
                rows_of_blocks = self._between(x, values_of)
            except RuntimeError:
                return NotImplemented  # an op that torch cannot batch
            values_of[call] = BY_BLOCK(rows_of_blocks, values_of[weight], own, str(call.target), 1 / self.count)
        result = values_of[self.experts.calls[-1]]
        return result.gather(1, over((rows - first) % number, result)).sum(0)

    def _by_block(self, values_of: dict[fx.Node, torch.Tensor], row_order: torch.Tensor) -> dict[fx.Node, torch.Tensor]:
        """Return the values that have rows, for every block, with the block's own rows first."""
        by_block = {node: values_of[node][row_order] for node in self.inputs if node in self.by_row}
        for node, (table, which) in self.tables.items():
            own = _in_blocks(values_of[table], self.count)
            begins = torch.arange(0, values_of[table].shape[0], own.shape[1], device=own.device)
            row = (values_of[which][row_order] - begins.unsqueeze(1)).clamp(0, own.shape[1] - 1)
            by_block[node] = own.gather(1, over(row, own))
        return by_block

    def _between(self, x: fx.Node, values_of: dict[fx.Node, torch.Tensor]) -> torch.Tensor:
        """Return a value between matmuls, for every block."""
        if x in values_of:
            return values_of[x]
        batched = [node for node in values_of if node in self.by_row or node in self.experts.calls]

        def one(*values: torch.Tensor) -> Any:
            computed: dict[fx.Node, Any] = {**values_of, **dict(zip(batched, values, strict=True))}
            for node in self.experts.between:
                if all(each in computed or each.op == "get_attr" for each in node.all_input_nodes):
                    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda each: computed[each])
                    computed[node] = node.target(*args, **kwargs)  # type: ignore[operator]
            return computed[x]

        batched_value: torch.Tensor = torch.vmap(one)(*(values_of[node] for node in batched))
        return batched_value


def _in_blocks(value: torch.Tensor, count: int) -> torch.Tensor:
    return value.view(count, -1, *value.shape[1:])


def over(index: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Expand [blocks, rows] to [blocks, rows, columns, ..], for `gather`."""
    for _ in range(like.ndim - 2):
        index = index.unsqueeze(-1)
    return index.expand(-1, -1, *like.shape[2:]) if like.ndim > 2 else index
