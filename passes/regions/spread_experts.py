"""Let every rank run the experts that it holds, on all tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from tpcompiler.ir import edit
from tpcompiler.ir.program import DISPATCH, PlannedProgram
from tpcompiler.ir.region import Region, write_regions
from tpcompiler.passes._expert_rows import (
    ExpertRows,
    ExpertRun,
    NotBatchedError,
    find_matmuls,
    find_tables,
    leaf_behind,
    over,
    refuse_uneven,
)


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
    for rows in find_matmuls(graph):
        counts = {_blocks(program, edit.operands(call)[1]) for call in rows.calls}
        if len(counts) == 1 and (count := counts.pop()) > 1:
            tables = {node: own for node, own in find_tables(rows) if _blocks(program, own.value) == count}
            rows = replace(rows, sources={**rows.sources, **tables})
            inputs = [rows.ends, *rows.inputs]
            yield Region(rows.calls[-1], inputs, partial(_run, rows, inputs, count))


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


def _run(rows: ExpertRows, inputs: list[fx.Node], count: int, *values: Tensor) -> Any:
    given = dict(zip(inputs, values, strict=True))
    places = _Rotated.of(given[rows.ends], given[edit.operands(rows.calls[0])[0]], count)
    try:
        return places.put_back(ExpertRun(rows, given, places).by_expert(rows.calls[-1]))
    except NotBatchedError:
        return NotImplemented


@dataclass
class _Rotated:
    """All rows at every rank, with those of its own experts first.

    `first`: the row where these begin: [ranks, 1]. `order`: the row in each place: [ranks, rows].
    """

    ends: Tensor
    used: float
    rows: Tensor
    number: Tensor
    first: Tensor
    order: Tensor

    @classmethod
    def of(cls, ends: Tensor, x: Tensor, count: int) -> _Rotated:
        ends = _in_blocks(ends, count)
        first = torch.cat([torch.zeros_like(ends[:1, -1:]), ends[:-1, -1:]])
        ones = torch.ones_like(x[:, 0], dtype=torch.int64)
        rows, number = ones.cumsum(0) - 1, ones.sum()  # their number may be dynamic
        return cls(ends - first, 1 / count, rows, number, first, (rows + first) % number)

    def send(self, value: Tensor, repeats: int) -> Tensor:
        return value[self.order]

    def look_up(self, table: Tensor, experts: Tensor | None) -> Tensor:
        assert experts is not None
        own = _in_blocks(table, len(self.ends))
        begins = torch.arange(0, table.shape[0], own.shape[1], device=own.device)
        row = (experts[self.order] - begins.unsqueeze(1)).clamp(0, own.shape[1] - 1)
        return own.gather(1, over(row, own))

    def put_back(self, value: Tensor) -> Tensor:
        """Return the rows in their order; of each, one rank has other numbers than zeros."""
        return value.gather(1, over((self.rows - self.first) % self.number, value)).sum(0)


def _in_blocks(value: Tensor, count: int) -> Tensor:
    return value.view(count, -1, *value.shape[1:])
