"""Tokens that are cut over the ranks of the experts: sent to these by all_to_all, and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim, export

import tpcompiler
from tests.zoo.case import randomise
from tpcompiler.api.request import Request
from tpcompiler.cost.fusion import rows_share
from tpcompiler.errors import PlanError
from tpcompiler.ir import edit
from tpcompiler.parallel.pipeline import find_placements
from tpcompiler.passes.regions import dispatch_experts
from tpcompiler.rules.experts import BY_BLOCK

pytest.importorskip("transformers.integrations.moe")
grouped_mm = torch.ops.transformers.grouped_mm_fallback  # torch's own takes no float32 in an export
TOKENS, CHOSEN, EXPERTS, FEATURES = 64, 2, 32, 16
X = torch.randn(TOKENS, FEATURES, generator=torch.Generator().manual_seed(1))
SAMPLES: dict[str, Any] = {"inputs": [{"ep": "S(0)"}], "outputs": [{"ep": "S(0)"}]}


class Experts(nn.Module):
    """The best of the experts for every token; rows are sorted by expert, and put back by adding them to their token."""

    def __init__(self, experts: int = EXPERTS, chosen: int = CHOSEN, bias: bool = False) -> None:
        super().__init__()
        self.chosen, self.router = chosen, nn.Linear(FEATURES, experts)
        self.up = nn.Parameter(torch.randn(experts, FEATURES, 32))
        self.down = nn.Parameter(torch.randn(experts, 32, FEATURES))
        if bias:
            self.up_bias, self.down_bias = (nn.Parameter(torch.randn(experts, n)) for n in (32, FEATURES))
        self.bias = bias

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, chosen = self.router(x).softmax(-1).topk(self.chosen)
        return weights.flatten(), chosen.flatten()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.route(x)
        expert, order = chosen.sort()
        made = self.experts(x[order // self.chosen], expert) * weights[order].unsqueeze(-1)
        return torch.zeros_like(x).index_add(0, order // self.chosen, made)

    def experts(self, rows: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        ends = (torch.arange(self.up.shape[0]) == expert.unsqueeze(-1)).sum(0).cumsum(0, dtype=torch.int32)
        between = grouped_mm(rows, self.up, ends)
        between = F.silu(between + self.up_bias[expert] if self.bias else between)
        made: torch.Tensor = grouped_mm(between, self.down, ends)
        return made + self.down_bias[expert] if self.bias else made


class PutBack(Experts):
    """As Hugging Face's models put rows back: by the inverse of the order."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.route(x)
        expert, order = chosen.sort()
        made = self.experts(x[order // self.chosen], expert) * weights[order].unsqueeze(-1)
        inverse = torch.empty_like(order).index_put((order,), torch.arange(order.shape[0]))
        return made[inverse].view(-1, self.chosen, FEATURES).sum(1)


class Scaled(Experts):
    """Another value of the rows is used between the matmuls, and another before the first."""

    def experts(self, rows: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        ends = torch.searchsorted(expert, torch.arange(self.up.shape[0]), right=True).to(torch.int32)
        gate, up = grouped_mm(rows.relu(), self.up, ends).chunk(2, -1)
        between = F.silu(gate) * up * rows.mean(-1, keepdim=True)
        made: torch.Tensor = grouped_mm(torch.cat([between, gate], -1), self.down, ends)
        return made


class ByPosition(Experts):
    """Rows are scaled by their place in the order, so no other order will do."""

    def experts(self, rows: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        return super().experts(rows * torch.arange(rows.shape[0]).unsqueeze(-1), expert)


class OtherEnds(Experts):
    """Rows are multiplied with the matrices of other experts than those that they are sorted by."""

    def experts(self, rows: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        return super().experts(rows, self.up.shape[0] - 1 - expert)


def built(kind: type[Experts] = Experts, *args: Any, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    return randomise(kind(*args, **kwargs))


def converted(net: nn.Module, mesh: Any, style: str = "dispatch_experts", **asked: Any) -> tpcompiler.ParallelProgram:
    plan = {name: style for name, _ in net.named_parameters() if "router" not in name}
    exported = export(net, (X,), dynamic_shapes=asked.pop("dynamic", None))
    return tpcompiler.parallelize(exported, mesh, plan, **{**SAMPLES, **asked})


def sent(program: tpcompiler.ParallelProgram) -> list[tuple[str, int, int]]:
    return [(each.kind, each.payload_bytes, each.wire_bytes) for each in program.collectives()]


def all_to_all(ranks: int, *payloads: int) -> list[tuple[str, int, int]]:
    return [("all_to_all", each, each * (ranks - 1) // ranks) for each in payloads]


@pytest.mark.sample(1)
@pytest.mark.parametrize("ranks", [4, 8])
def test_exact_by_hand(ranks: int) -> None:
    """A rank tells the others how many rows each expert gets, and sends each as many as it could have at most.

    That is two rows a token, of two choices among 8 or 4 experts of a rank. All of them, and nothing else, come back.
    """
    program = converted(built(), {"ep": ranks})
    rows = ranks * (TOKENS // ranks * CHOSEN) * FEATURES * 4
    assert sent(program) == all_to_all(ranks, EXPERTS * 4, rows, rows)
    assert program.verify((X,)).ok
    assert program.check().ok


@pytest.mark.slow
@pytest.mark.parametrize(("experts", "slots"), [(8, 1), (16, 2), (24, 3)])
def test_a_token_has_no_more_rows_than_a_rank_has_experts(experts: int, slots: int) -> None:
    """Of three choices, one can be of the one expert of a rank."""
    program = converted(built(Experts, experts, 3), {"ep": 8})
    rows = 8 * (TOKENS // 8 * slots) * FEATURES * 4
    assert sent(program) == all_to_all(8, experts * 4, rows, rows)
    assert program.verify((X,)).ok


@pytest.mark.sample(1)
@pytest.mark.sweep
@pytest.mark.parametrize("mesh", [{"ep": 2}, {"tp": 4}, {"dp": 2, "ep": 2}, {"ep": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("kind", [Experts, PutBack, Scaled])
def test_numbers(kind: type[Experts], mesh: Any) -> None:
    net = built(kind, 8, bias=kind is not Scaled)
    axis = "ep" if "ep" in mesh else "tp"
    cut = [{axis: "S(0)"}]
    program = converted(net, mesh, inputs=cut, outputs=cut)
    assert {each[0] for each in sent(program)} == {"all_to_all"}
    assert program.verify((X,)).ok
    assert program.check().ok


@pytest.mark.slow
def test_any_number_of_tokens() -> None:
    program = converted(built(Experts, 8, bias=True), {"ep": 4}, dynamic=({0: Dim("tokens")},))
    for count in (4, 12, 64):
        assert program.verify((torch.randn(count, FEATURES),)).ok


@pytest.mark.slow
def test_ranks_without_a_token() -> None:
    """All tokens go to experts 0 and 1, which are the first rank's."""
    net = built(Experts, 8)
    with torch.no_grad():
        net.router.weight.zero_()
        net.router.bias.copy_(torch.tensor([2.0, 1.0, *[-9.0] * 6]))
    assert converted(net, {"ep": 4}).verify((X,)).ok


@pytest.mark.slow
def test_a_wrong_slot_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the numbers and of the proof: every rank reads the slots of its neighbour's rows."""
    send = dispatch_experts._Slots.send
    monkeypatch.setattr(dispatch_experts._Slots, "send", lambda *args: send(*args).flip(0))
    program = converted(built(), {"ep": 4})
    assert not program.verify((X,)).ok
    assert not program.check().ok


@pytest.mark.slow
@pytest.mark.parametrize(("experts", "chosen", "is_taken"), [(8, 4, True), (16, 4, False), (32, 2, False)])
def test_auto_takes_the_cheaper(experts: int, chosen: int, is_taken: bool) -> None:
    """With one expert on each rank, as many bytes are sent as by an all_gather, and fewer rows are moved in memory.

    With two, twice as many bytes are sent, which is tried and takes longer; with more experts than choices it is not
    even tried. All for the fewest bytes of weights: for the fastest call, each rank of these few holds all experts.
    """
    net = built(Experts, experts, chosen)
    exported = export(net, (X.repeat(16, 1),))

    def seconds(**entries: str) -> float:
        plan = {**entries, "**": "auto"}
        request = Request(exported, {"ep": 8}, plan, **SAMPLES, machine="ideal", optimize="memory")
        return find_placements([*request.conversions().values()], forms=False).seconds

    program = tpcompiler.parallelize(exported, {"ep": 8}, "auto", machine="ideal", optimize="memory", **SAMPLES)
    forms = program.converted.plan.forms.to_data()
    assert (forms == {"up": "dispatch_experts", "down": "dispatch_experts"}) is is_taken
    dispatched, alone = seconds(up="dispatch_experts", down="dispatch_experts"), seconds()
    assert (dispatched < alone) is is_taken
    assert ("in other forms" in program.report()) is (chosen > experts // 8)
    assert program.verify((X.repeat(16, 1),)).ok


def test_the_price_of_a_block() -> None:
    """A rank has slots for all 128 rows, and is expected to get a quarter."""
    plan = dict.fromkeys(("up", "down"), "dispatch_experts")
    request = Request(export(built(), (X,)), {"ep": 4}, plan, machine="ideal")
    found = find_placements([*request.conversions().values()])
    (up, _) = [node for node in found.programs[0].graph.nodes if node.target is BY_BLOCK]
    rows = edit.shape(edit.operands(up)[0])[1]
    assert (rows, rows * rows_share(up)) == (128, 32)


@pytest.mark.parametrize(
    ("kind", "mesh", "asked", "said"),
    [
        (ByPosition, {"ep": 4}, {}, "'dispatch_experts' does not fit 'up': no grouped matmul takes it with rows that"),
        (OtherEnds, {"ep": 4}, {}, "'dispatch_experts' does not fit 'up': no grouped matmul takes it with rows that"),
        (Experts, {"ep": 3}, {}, "'up' is of 32 experts, which cannot be dealt out evenly to 3 ranks"),
        (Experts, {"ep": 32}, {"tokens": 48}, "the 48 tokens of 'up' cannot be dealt out evenly to 32 ranks"),
    ],
)
def test_requests_that_cannot_be_met(kind: type[Experts], mesh: Any, asked: dict[str, Any], said: str) -> None:
    exported = export(built(kind), (torch.randn(asked.get("tokens", TOKENS), FEATURES),))
    with pytest.raises(PlanError) as caught:
        tpcompiler.parallelize(exported, mesh, dict.fromkeys(("up", "down"), "dispatch_experts"))
    assert said in str(caught.value)
