"""Forms that the search takes where they pay: experts that are dealt out, norms on shares, attention in turns."""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim, ExportedProgram, export
from torch.nn import functional as F

import tpcompiler
from tests.zoo.case import randomise
from tests.zoo.found import from_file, written
from tpcompiler import ParallelProgram
from tpcompiler.api.request import Request
from tpcompiler.cost.fusion import find_kernels
from tpcompiler.cost.machine_file import read_machine
from tpcompiler.errors import ShardingError
from tpcompiler.ir.text import op_name
from tpcompiler.parallel import pipeline
from tpcompiler.parallel.pipeline import find_placements
from tpcompiler.passes._rewrite_candidates import find_forms
from tpcompiler.rules.experts import BY_BLOCK
from tpcompiler.solver.estimate import measure_step_time, seconds_of_ops, sent_by
from tpcompiler.solver.solution import Solution

MACHINE = str(Path(__file__).with_name("waits.yaml"))
BANDWIDTH = 1e9


class Experts(nn.Module):
    """Two of four experts for each token; with a norm inside, experts that are cut inside exchange its sums."""

    def __init__(self, features: int = 128, *, norm: bool = False) -> None:
        super().__init__()
        self.router = nn.Linear(64, 4)
        self.up, self.down = nn.Parameter(torch.empty(4, 64, features)), nn.Parameter(torch.empty(4, features, 64))
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        expert, order = chosen.flatten().sort()
        ends = (torch.arange(4) == expert.unsqueeze(-1)).sum(0).cumsum(0, dtype=torch.int32)
        between = F.silu(F.grouped_mm(x[order // 2], self.up, offs=ends))
        between = F.rms_norm(between, between.shape[-1:]) if self.norm else between
        made = F.grouped_mm(between, self.down, offs=ends) * weights.flatten()[order].unsqueeze(-1)
        return torch.zeros_like(x).index_add(0, order // 2, made)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.up, self.down = nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Blocks(nn.Module):
    """Tokens to features, through blocks with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(96, 64), nn.LayerNorm(64)
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Attend(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v)


class Attention(nn.Module):
    """One head of an odd number of features: whole keys and values, or a part of them at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = Attend()

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self.attend(q, k, v)


class Case:
    """A model, what it is called with, and what is asked for."""

    def __init__(self, model: nn.Module, args: tuple[torch.Tensor, ...], axis: str = "tp", **asked: Any) -> None:
        torch.manual_seed(0)
        self.model, self.args, self.axis, self.asked = model, args, axis, asked

    @cache  # noqa: B019
    def exported(self) -> ExportedProgram:
        return export(self.model, self.args)

    def converted(self, ranks: int, plan: Any = "auto", **asked: Any) -> ParallelProgram:
        return tpcompiler.parallelize(self.exported(), {self.axis: ranks}, plan, **{**self.asked, **asked})

    def placed(self, ranks: int, plan: Any = "auto", memory: int | None = None) -> Solution:
        boundary = self.asked.get("inputs"), self.asked.get("outputs")
        request = Request(self.exported(), {self.axis: ranks}, plan, *boundary, memory=memory)
        return find_placements([*request.conversions().values()])


def rows(count: int = 6) -> tuple[torch.Tensor]:
    return (torch.randn(count, 64, generator=torch.Generator().manual_seed(1)).bfloat16(),)


def experts(*args: Any, **kwargs: Any) -> nn.Module:
    return randomise(Experts(*args, **kwargs)).bfloat16()


def ids(steps: int) -> tuple[torch.Tensor]:
    return (torch.randint(96, (2, steps), generator=torch.Generator().manual_seed(1)),)


QKV = tuple(torch.randn(1, 1, steps, 63, generator=torch.Generator().manual_seed(steps)) for steps in (256, 1024, 1024))
STEPS: dict[str, Any] = {"inputs": ["S(2)"] * 3, "outputs": ["S(2)"]}
DEALT = {"up": "grouped_gemm", "down": "grouped_gemm"}
NORMS = {"layers.1.norm": "sequence_parallel", "layers.2.norm": "sequence_parallel", "norm": "sequence_parallel"}
TURNS = {"attend": "attend_in_turns"}
NORMED, PLAIN, NARROW = Case(experts(norm=True), rows()), Case(experts(), rows()), Case(experts(24), rows())
LONG, SHORT = Case(Blocks(), ids(512)), Case(Blocks(), ids(4))
KEYS = Case(Attention(), QKV, "cp", **STEPS)
# By time; where the fastest placements do not fit.
TAKEN: dict[str, tuple[Case, dict[str, str], dict[int, int | None]]] = {
    "experts": (NORMED, DEALT, {2: None, 4: None}),
    "experts that fit": (NARROW, DEALT, {2: 19_000, 4: 19_000}),
    "norms": (LONG, NORMS, {2: None, 4: None}),
    "turns": (KEYS, TURNS, {2: 760_000, 4: 350_000}),
}


def forms_of(program: ParallelProgram) -> dict[str, object]:
    return program.converted.plan.forms.to_data()


def seconds(found: Solution) -> float:
    return measure_step_time(found, read_machine()).total


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.sweep
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", TAKEN)
def test_a_form_that_pays(name: str, ranks: int, tmp_path: Path) -> None:
    """It is in the plan, which gives the very same program; the report says what it saves; the numbers are right."""
    case, form, limits = TAKEN[name]
    auto = case.converted(ranks, memory=limits[ranks])
    assert forms_of(auto) == form
    assert auto.verify(case.args).ok
    note = next(line for line in auto.report().splitlines() if "without it a call would take" in line)
    said = "norm, layers.*.norm x 2" if form == NORMS else ", ".join(form)
    assert note.strip().startswith(f"{next(iter(form.values()))}: {said}; without it")
    again = from_file(case.exported(), {case.axis: ranks}, tmp_path, memory=limits[ranks], **case.asked)
    assert written(again) == written(auto)


@pytest.mark.sample(1)
@pytest.mark.sweep
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("case", "form"),
    [(PLAIN, DEALT), (NARROW, DEALT), (SHORT, NORMS), (KEYS, TURNS)],
    ids=["experts", "experts that fit", "norms", "turns"],
)
def test_a_form_that_does_not_pay(case: Case, form: dict[str, str], ranks: int) -> None:
    """With room enough; asked for, it takes longer."""
    auto = case.converted(ranks)
    assert forms_of(auto) == {}
    assert "without it" not in auto.report()
    assert seconds(case.placed(ranks)) < seconds(case.placed(ranks, {**form, "**": "auto"}))


@pytest.mark.sample(1)
@pytest.mark.sweep
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ["experts", "norms"])
def test_by_how_much(name: str, ranks: int) -> None:
    """The search with the form, and without any."""
    case, form, _ = TAKEN[name]
    alone = pipeline.find_placements([*Request(case.exported(), ranks).conversions().values()], forms=False)
    assert seconds(case.placed(ranks)) == seconds(case.placed(ranks, {**form, "**": "auto"})) < seconds(alone)


def test_a_form_that_cannot_be_had_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else changes: the form of another finder is still taken."""
    finders = [lambda found: {"layers.0.up": "attend_in_turns"}, *find_forms("cpu")]
    monkeypatch.setattr(pipeline, "find_forms", lambda device: finders)
    auto = LONG.converted(2)
    assert forms_of(auto) == NORMS
    (declined,) = [line for line in auto.report().splitlines() if "attend_in_turns" in line]
    assert declined.startswith("  attend_in_turns was tried, and cannot be had: style 'attend_in_turns' does not fit ")
    assert "searched 4 times (1 with simpler ops, 2 in other forms)" in auto.report().splitlines()


@pytest.mark.parametrize(("tokens", "own_rows", "chosen"), [(6, 6, 2 * (1 - 0.5**6)), (1, 1, 1.0)])
def test_dealt_experts_by_hand(tokens: int, own_rows: int, chosen: float) -> None:
    """On two ranks each has two experts, half of the rows, and reads the experts that those are expected to choose."""
    case = Case(experts(), rows(tokens))
    found = case.placed(2, {**DEALT, "**": "auto"})
    dealt = [seconds for node, seconds in seconds_of_ops(found, read_machine()) if node.target is BY_BLOCK]
    matrix, ends, all_rows = 64 * 128 * 2, 2 * 4, 2 * tokens
    up = own_rows * 64 * 2 + chosen * matrix + ends + all_rows * 128 * 2
    down = own_rows * 128 * 2 + chosen * matrix + ends + all_rows * 64 * 2
    assert dealt == pytest.approx([up / BANDWIDTH, down / BANDWIDTH])


@pytest.mark.parametrize("ranks", [2, 4])
def test_turns_by_hand(ranks: int) -> None:
    """As many floors of attention and gathers as turns; in each a share of the queries meets a share of the keys."""
    found, machine = KEYS.placed(ranks, {**TURNS, "**": "auto"}), read_machine()
    kernels = find_kernels(found.programs[0].graph)
    assert Counter(kernel.floor for kernel in kernels.values())["attention"] == ranks
    q, k = 256 // ranks * 63 * 4, 1024 // ranks * 63 * 4
    turns = [own for node, own in seconds_of_ops(found, machine) if "scaled_dot" in op_name(node)]
    assert turns == pytest.approx([(q + 2 * k + q + 256 // ranks * 4) / BANDWIDTH] * ranks)
    assert Counter(sent_by(found)) == {("all_gather", ("cp",), 2 * k * (ranks - 1) // ranks): ranks}
    assert measure_step_time(found, machine).kernels == pytest.approx(ranks * 1e-5)


@pytest.mark.parametrize("ranks", [2, 4])
def test_norms_by_hand(ranks: int) -> None:
    """Three sums are left in shares, all four norms work on these; products are not, for their weights would be whole."""
    found, machine = LONG.placed(ranks), read_machine()
    share = 2 * 512 * 64 * 4 * (ranks - 1) // ranks
    sent = {("reduce_scatter", ("tp",), share): 3, ("all_gather", ("tp",), share): 4}
    assert Counter(sent_by(found)) == sent
    assert {found.styles[f"layers.{at}.{name}"] for at in range(3) for name in ("up", "down")} == {"colwise", "rowwise"}
    products = 6 * 2 * 2 * 512 * 64 * 256 / ranks / 1e12
    moved = 6 * 64 * 256 * 4 / ranks + 6 * 2 * 512 * (64 + 256 / ranks) * 4
    work = sum(own for node, own in seconds_of_ops(found, machine) if op_name(node) == "linear")
    assert work == pytest.approx(max(products, moved / BANDWIDTH), rel=1e-6)


@pytest.mark.slow
def test_a_wrong_form_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the numbers: every turn has the same part, every block the rows of its neighbour."""
    with monkeypatch.context() as patch:
        patch.setattr("tpcompiler.passes.regions.attend_in_turns._Turns.parts", _first_part_again)
        assert not KEYS.converted(2, memory=760_000).verify(KEYS.args).ok
    monkeypatch.setattr("tpcompiler.passes.regions.spread_experts.over", lambda index, like: _over(index.flip(0), like))
    assert not NORMED.converted(2).verify(NORMED.args).ok


def _first_part_again(self: Any, value: torch.Tensor, dim: int) -> Any:
    part = torch.ops.aten.unflatten.int(value, dim, [self.ranks, self.ranks, -1]).select(dim + 1, 0)
    yield from [part.flatten(dim, dim + 1)] * self.ranks


def _over(index: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return index.unsqueeze(-1).expand(-1, -1, like.shape[2])


def test_a_limit_that_no_form_meets() -> None:
    with pytest.raises(ShardingError, match="more than the limit of 10 kB"):
        KEYS.converted(4, memory=10_000)


def test_what_a_plan_says_holds() -> None:
    """No form of a layer that the plan names."""
    asked = NORMED.converted(2, {"up": "S(2)", "**": "auto"})
    assert forms_of(asked) == {}
    assert asked.verify(NORMED.args).ok


@pytest.mark.slow
def test_a_length_that_may_be_odd_is_not_cut() -> None:
    """Shares of the sequence would not let the caller choose it; a multiple of the ranks is."""
    (x,) = ids(512)
    for length, form in ((Dim("length", min=2, max=4096), {}), (2 * Dim("half", min=2, max=2048), NORMS)):
        made = tpcompiler.parallelize(export(Blocks(), (x,), dynamic_shapes=[{1: length}]), 2, "auto")
        assert forms_of(made) == form
