"""Let every rank run the experts that it holds, on all tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from tpcompiler._torch import OpOverload, functional_op, trace_ops, tree_flatten
from tpcompiler.errors import PlanError
from tpcompiler.ir import edit
from tpcompiler.ir.draws import remove_unused
from tpcompiler.ir.experts import BY_BLOCK
from tpcompiler.ir.local import fake_mode_of, no_new_guards
from tpcompiler.ir.program import PlannedProgram
from tpcompiler.passes._experts import Region, find_regions, leaf_behind


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
    graph = edit.copy_graph(program.graph)
    with no_new_guards(graph):
        for region in list(find_regions(graph)):
            counts = {_blocks(program, edit.operands(call)[1]) for call in region.calls}
            if len(counts) == 1 and (count := counts.pop()) > 1:
                _Body.of(program, region, count).write()
    remove_unused(graph)
    return replace(program, graph=graph)


def _blocks(program: PlannedProgram, weight: fx.Node) -> int:
    """Return among how many ranks the plan deals out the groups, the first dim of a weight; 1 if it does not.

    Raises:
        PlanError: the groups cannot be dealt out evenly.
    """
    leaf = leaf_behind(weight)
    constraint = None if leaf is None else program.constraints.get(leaf.name)
    if leaf is None or constraint is None or constraint.request is None:
        return 1
    count, experts = program.mesh.size(constraint.sharding.dims[0].axes), edit.shape(leaf)[0]
    if experts % count:
        fits = [str(degree) for degree in range(1, experts + 1) if experts % degree == 0]
        raise PlanError(
            f"'{constraint.leaf}' is of {experts} experts, which cannot be dealt out evenly to {count} ranks",
            help=f"use a degree of {', '.join(fits[:-1])} or {fits[-1]}, or cut the experts inside",
            asked_by=constraint.asked_by,
        )
    return count


@dataclass
class _Body:
    """The body that replaces a region, for a number of blocks.

    `inputs`: its operands from outside. `tables`: look-ups in tables that the ranks hold by expert: (table, expert
    index).
    """

    region: Region
    count: int
    inputs: list[fx.Node]
    tables: dict[fx.Node, tuple[fx.Node, fx.Node]]

    @classmethod
    def of(cls, program: PlannedProgram, region: Region, count: int) -> _Body:
        tables = {node: (table, which) for node, table, which in region.tables() if _blocks(program, table) == count}
        inputs = [region.ends]
        inputs += [operand for node in (*region.between, *region.calls) for operand in edit.operands(node)]
        inputs += [node for pair in tables.values() for node in pair]
        inner = region.inner
        outer = [node for node in dict.fromkeys(inputs) if node not in inner and node not in tables]
        return cls(region, count, outer, tables)

    def write(self) -> None:
        """Replace the last matmul by the body."""
        last = self.region.calls[-1]
        with fake_mode_of(last.graph), torch.no_grad():
            values = [torch.empty_like(edit.fake(node)) for node in self.inputs]
            try:
                body = trace_ops(self.run, *values)
            except RuntimeError:
                return  # an op that torch cannot batch
        _write_nothing_in_place(body)
        body.eliminate_dead_code()
        numbers = tree_flatten([(inner.args, inner.kwargs) for inner in body.nodes])[0]
        if not any(isinstance(number, torch.SymInt) for number in numbers):
            edit.graft(last, body, self.inputs, {})

    def run(self, *values: torch.Tensor) -> torch.Tensor:
        values_of = dict(zip(self.inputs, values, strict=True))
        ends = _in_blocks(values_of[self.region.ends], self.count)
        first = torch.cat([torch.zeros_like(ends[:1, -1:]), ends[:-1, -1:]])
        ones = torch.ones_like(values_of[edit.operands(self.region.calls[0])[0]][:, 0], dtype=torch.int64)
        rows, number = ones.cumsum(0) - 1, ones.sum()  # their number may be dynamic
        own = ends - first
        values_of |= self._by_block(values_of, (rows + first) % number)
        for call in self.region.calls:
            x, weight, _ = edit.operands(call)
            values_of[call] = BY_BLOCK(self._between(x, values_of), values_of[weight], own, str(call.target))
        result = values_of[self.region.calls[-1]]
        return result.gather(1, _over((rows - first) % number, result)).sum(0)

    def _by_block(self, values_of: dict[fx.Node, torch.Tensor], row_order: torch.Tensor) -> dict[fx.Node, torch.Tensor]:
        """Return the values that have rows, for every block, with the block's own rows first."""
        by_block = {
            node: values_of[node][row_order] for node in self.inputs if node in self.region.rowwise | self._entering()
        }
        for node, (table, which) in self.tables.items():
            own = _in_blocks(values_of[table], self.count)
            begins = torch.arange(0, values_of[table].shape[0], own.shape[1], device=own.device)
            row = (values_of[which][row_order] - begins.unsqueeze(1)).clamp(0, own.shape[1] - 1)
            by_block[node] = own.gather(1, _over(row, own))
        return by_block

    def _entering(self) -> set[fx.Node]:
        return {edit.operands(call)[0] for call in self.region.calls}.difference(self.region.between, self.region.calls)

    def _between(self, x: fx.Node, values_of: dict[fx.Node, torch.Tensor]) -> torch.Tensor:
        """Return a value between matmuls, for every block."""
        if x in values_of:
            return values_of[x]
        inner = {*self.region.calls, *self.region.rowwise, *self._entering()}
        batched = [node for node in values_of if node in inner]

        def one(*values: torch.Tensor) -> Any:
            computed: dict[fx.Node, Any] = {**values_of, **dict(zip(batched, values, strict=True))}
            for node in self.region.between:
                if all(each in computed or each.op == "get_attr" for each in node.all_input_nodes):
                    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda each: computed[each])
                    computed[node] = node.target(*args, **kwargs)  # type: ignore[operator]
            return computed[x]

        batched_value: torch.Tensor = torch.vmap(one)(*(values_of[node] for node in batched))
        return batched_value


def _write_nothing_in_place(body: fx.Graph) -> None:
    """Replace in-place ops of batching by functional ones; nothing reads the old values of their operands."""
    for node in edit.calls(body):
        if isinstance(node.target, OpOverload) and node.target._schema.is_mutable:
            node.target = functional_op(node.target) or node.target


def _in_blocks(value: torch.Tensor, count: int) -> torch.Tensor:
    return value.view(count, -1, *value.shape[1:])


def _over(index: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Expand [blocks, rows] to [blocks, rows, columns], for `gather`."""
    return index.unsqueeze(-1).expand(-1, -1, like.shape[2])
