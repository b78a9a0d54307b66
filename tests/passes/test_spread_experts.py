"""Experts over ranks: each multiplies the rows of its own, and one sum over the ranks gives every token its result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import nn
from torch.export import export

import tpcompiler
from tests.passes.stages import Call, planned
from tests.zoo.case import randomise
from tpcompiler.errors import PlanError
from tpcompiler.ir.text import program_text
from tpcompiler.passes.regions.join_branches import join_branches
from tpcompiler.passes.regions.spread_experts import spread_experts
from tpcompiler.rules.experts import BY_BLOCK

X = torch.randn(6, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
PLAN = {"up": "grouped_gemm", "down": "grouped_gemm"}
V = torch.randn(2, 4)
T_H = 6 * 16 * 2  # bytes of the result


class Experts(nn.Module):
    """Top 2 of the experts for every token, sorted by expert as grouped matmuls want them."""

    def __init__(self, experts: int = 4, bias: bool = False) -> None:
        super().__init__()
        self.router = nn.Linear(16, experts)
        self.up, self.down = nn.Parameter(torch.randn(experts, 16, 32)), nn.Parameter(torch.randn(experts, 32, 16))
        self.bias = nn.Parameter(torch.randn(experts, 32)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        expert, order = chosen.flatten().sort()
        ends = (torch.arange(self.up.shape[0]) == expert.unsqueeze(-1)).sum(0).cumsum(0, dtype=torch.int32)
        made = self.experts(x[order // 2], expert, ends) * weights.flatten()[order].unsqueeze(-1)
        return torch.zeros_like(x).index_add(0, order // 2, made)

    def experts(self, rows: torch.Tensor, expert: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        between = F.silu(F.grouped_mm(rows, self.up, offs=ends))
        if self.bias is not None:
            between = between + self.bias[expert]
        made: torch.Tensor = F.grouped_mm(between, self.down, offs=ends)
        return made


class Gated(Experts):
    """Two matmuls before the last one, of rows that are scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(4, 16, 32))

    def experts(self, rows: torch.Tensor, expert: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        gate, up = (F.grouped_mm(rows, weight, offs=ends) for weight in (self.gate, self.up))
        rest, part = (F.silu(gate) * up * rows.mean(-1, keepdim=True)).chunk(2, -1)
        made: torch.Tensor = F.grouped_mm(torch.cat([part, rest], -1), self.down, offs=ends)
        return made


class UsedBetween(Experts):
    """What lies between is a result too."""

    def experts(self, rows: torch.Tensor, expert: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        between = F.grouped_mm(rows, self.up, offs=ends)
        made: torch.Tensor = F.grouped_mm(between, self.down, offs=ends)
        return made + between.sum()


class ByToken(Experts):
    """What lies between is scaled for each row, and gets a row of a table that has as many as there are experts."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(4, 32))

    def forward(self, x: torch.Tensor, scale: torch.Tensor, word: torch.Tensor) -> torch.Tensor:
        expert, order = self.router(x).argmax(-1).sort()
        ends = (torch.arange(4) == expert.unsqueeze(-1)).sum(0).cumsum(0, dtype=torch.int32)
        between = F.grouped_mm(x[order], self.up, offs=ends).relu() * scale[order] + self.table[word[order]]
        made: torch.Tensor = F.grouped_mm(between, self.down, offs=ends)
        return made[order.argsort()]


def built(kind: type[Experts] = Experts, *args: Any, **kwargs: Any) -> Experts:
    made = randomise(kind(*args, **kwargs)).bfloat16()
    assert isinstance(made, Experts)
    return made


def converted(net: nn.Module, mesh: Any, plan: Mapping[str, object], dynamic: Any = None) -> tpcompiler.ParallelProgram:
    return tpcompiler.parallelize(export(net, (X,), dynamic_shapes=dynamic), mesh, plan)


def test_the_docstring() -> None:
    module = Call(
        lambda self, x, ends: F.grouped_mm(F.grouped_mm(x, self.w1, offs=ends).relu(), self.w2, offs=ends),
        w1=(4, 16, 32),
        w2=(4, 32, 16),
    ).bfloat16()
    ends = torch.tensor([1, 3, 3, 6], dtype=torch.int32)
    program = planned(module, (X, ends), {"w1": "grouped_gemm", "w2": "grouped_gemm"})
    assert_expected_inline(
        program_text(spread_experts(program)),
        """\
p_w1: S(0) = w1 bf16[4, 16, 32]
p_w2: S(0) = w2 bf16[4, 32, 16]
x = input bf16[6, 16]
ends = input i32[4]
view = view(ends, [2, -1])
slice_1 = slice(view, 0, 0, 1)
slice_2 = slice(slice_1, 1, 1, 9223372036854775807)
zeros_like = zeros_like(slice_2, pin_memory=False)
slice_3 = slice(view, 0, 0, 1)
slice_4 = slice(slice_3, 1, 1, 9223372036854775807)
cat = cat([zeros_like, slice_4])
select = select(x, 1, 0)
ones_like = ones_like(select, dtype=i64, pin_memory=False)
cumsum = cumsum(ones_like, 0)
sub = sub(cumsum, 1)
sum_1 = sum(ones_like)
sub_1 = sub(view, cat)
add = add(sub, cat)
remainder = remainder(add, sum_1)
index = index(x, [remainder])
grouped_mm_by_block = grouped_mm_by_block(index, p_w1, sub_1, 'aten._grouped_mm.default', 0.5)
relu_1 = relu(grouped_mm_by_block)
grouped_mm_by_block_1 = grouped_mm_by_block(relu_1, p_w2, sub_1, 'aten._grouped_mm.default', 0.5)
sub_2 = sub(sub, cat)
remainder_1 = remainder(sub_2, sum_1)
unsqueeze = unsqueeze(remainder_1, -1)
expand = expand(unsqueeze, [-1, -1, 16])
gather = gather(grouped_mm_by_block_1, 1, expand)
_grouped_mm_1 = sum(gather, [0])
pin: R = pin(_grouped_mm_1)
return pin
""",
    )


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("mesh", [2, 4, {"dp": 2, "tp": 2}, {"tp": 2, "ep": 2}], ids=str)
@pytest.mark.parametrize(
    ("net", "plan"),
    [
        (built(), PLAN),
        (built(bias=True), {**PLAN, "bias": "grouped_gemm"}),
        (built(Gated), {**PLAN, "gate": "grouped_gemm"}),
    ],
    ids=["plain", "bias", "gated"],
)
def test_one_all_reduce_of_tokens(net: Experts, plan: Mapping[str, object], mesh: Any) -> None:
    program = converted(net, mesh, plan)
    axis = "ep" if isinstance(mesh, dict) and "ep" in mesh else "tp"
    assert [(c.kind, c.axis, c.payload_bytes) for c in program.collectives()] == [("all_reduce", axis, T_H)]
    assert program.verify((X,)).ok
    held = {row.name: row.sharding for row in program.manifest().tensors}
    assert all("S(0)" in held[name] for name in plan)
    assert "by_block" not in str(program.rank_program(0).graph)  # a rank calls torch's kernel


@pytest.mark.parametrize("plan", [PLAN, {**PLAN, "table": "S(0)"}, "auto"], ids=["experts", "table", "auto"])
@pytest.mark.parametrize("placed", ["x", "scale"])
def test_look_ups_by_token_are_no_tables_of_experts(plan: Any, placed: str) -> None:
    """Their values are sharded as the experts are, and may have as many rows."""
    args = X[:4], torch.rand(4, 1, dtype=torch.bfloat16), torch.tensor([3, 0, 0, 2])
    program = tpcompiler.parallelize(export(built(ByToken), args), 2, plan, inputs={placed: "S(0)"})
    assert program.verify(args).ok


@pytest.mark.slow
def test_ranks_without_a_token() -> None:
    """All tokens go to experts 0 and 1, which are the first rank's."""
    net = built()
    with torch.no_grad():
        net.router.weight.zero_()
        net.router.bias.copy_(torch.tensor([2.0, 1.0, -9.0, -9.0]))
    assert converted(net, 4, PLAN).verify((X,)).ok


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"tp": 2, "ep": 2}, {"tp": 4, "ep": 2}], ids=str)
def test_experts_over_one_axis_and_inside_over_another(mesh: Any) -> None:
    plan = {"up": {"ep": "S(0)", "tp": "S(2)"}, "down": {"ep": "S(0)", "tp": "S(1)"}}
    program = converted(built(), mesh, plan)
    assert [(c.kind, c.axis, c.payload_bytes) for c in program.collectives()] == [("all_reduce", "tp.ep", T_H)]
    assert program.verify((X,)).ok


def test_what_is_used_between_is_refused() -> None:
    program = join_branches(planned(built(UsedBetween), (X,), PLAN))
    assert program_text(spread_experts(program)) == program_text(program)


def test_experts_that_cannot_be_dealt_out() -> None:
    with pytest.raises(PlanError) as caught:
        converted(built(Experts, 6), 4, PLAN)
    assert_expected_inline(
        str(caught.value),
        """\
'up' is of 6 experts, which cannot be dealt out evenly to 4 ranks
  help: use a degree of 1, 2, 3 or 6, or cut the experts inside
  asked by: the plan ("up": "grouped_gemm")""",
    )


def test_rows_behind_a_block_are_zeros() -> None:
    x, weight = torch.randn(2, 5, 4), torch.randn(6, 4, 4)
    ends = torch.tensor([[1, 1, 4], [0, 2, 3]], dtype=torch.int32)
    made = BY_BLOCK(x, weight, ends, "aten._grouped_mm.default", 0.5)
    by_hand = torch.zeros(2, 5, 4)
    for block, row, expert in [(0, 0, 0), (0, 1, 2), (0, 2, 2), (0, 3, 2), (1, 0, 4), (1, 1, 4), (1, 2, 5)]:
        by_hand[block, row] = x[block, row] @ weight[expert]
    torch.testing.assert_close(made, by_hand)


@pytest.mark.parametrize(("style", "dim"), [("colwise", 1), ("rowwise", 2)])
def test_a_style_means_the_features_of_experts_that_are_looked_up(style: str, dim: int) -> None:
    """Not which of them: that is how `rowwise` reads a table of vectors, an embedding."""
    module = Call(lambda self, x: torch.bmm(self.w[x[:, 0].long().abs() % 3], x.unsqueeze(-1)), w=(3, 8, 4))
    program = planned(module, (V,), {"w": style})
    assert [own.sharding.text(program.mesh) for own in program.planned.values()] == [f"S({dim})"]


def test_a_style_that_places_nothing_touches_no_layer() -> None:
    """The experts' own weights have entries of their own, or are whole on every rank: the report says so."""
    module = Call(lambda self, x: self.experts(x), experts=Call(lambda self, x: x @ self.w, w=(4, 4)))
    (note,) = planned(module, (V,), {"experts": "moe_tp_experts"}).notes
    assert (note.kind, note.text) == ("untouched", "experts")
    assert not planned(module, (V,), {"experts": "moe_tp_experts", "experts.w": "S(1)"}).notes
