"""What the search decides on real machines: never slower than Megatron's plan, and as few collectives in a decode."""

from __future__ import annotations

import dataclasses
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch.export import ExportedProgram

import tpcompiler
from tests.long import in_long_runs
from tests.solver.test_auto import mlp
from tools.bench_decisions import EVEN, decide_call, find_calls, find_machines, render_table
from tools.published.model import Dims, export_decoder, megatron_plan
from tpcompiler.api.request import Request
from tpcompiler.cost.machine import Machine
from tpcompiler.cost.machine_file import read_machine
from tpcompiler.errors import PlanError
from tpcompiler.parallel.pipeline import find_placements
from tpcompiler.solver.estimate import measure_step_time, sent_by
from tpcompiler.solver.solution import Solution

MACHINE = "ideal"  # as if latencies were none: small models are worth cutting

ROOT = Path(__file__).parents[2]
LAYERS = 2
LLAMA = Dims(LAYERS, 4096, 14336, 32, 8, 128256)
MIXTRAL = Dims(LAYERS, 4096, 14336, 32, 8, 32000, experts=8)
GPT2 = Dims(LAYERS, 1600, 6400, 25, 25, 50257, gated=False)
DECODE, PREFILL = (8, 1024, True), (1, 2048, False)


@cache
def exported(dims: Dims, batch: int, prompt: int, is_decode: bool) -> ExportedProgram:
    return export_decoder(dims, batch, prompt, is_decode=is_decode)


def solved(dims: Dims, call: tuple[int, int, bool], tp: int, plan: Any, machine: Machine) -> tuple[Solution, float]:
    found = find_placements([*Request(exported(dims, *call), tp, plan, machine=machine).conversions().values()])
    return found, measure_step_time(found, machine).total


@pytest.mark.sample(1)
@pytest.mark.sweep(5)
@pytest.mark.parametrize("call", [DECODE, PREFILL], ids=["decode", "prefill"])
@pytest.mark.parametrize("tp", [2, 8])
@pytest.mark.parametrize("name", ["h100", "a100-graph", "rtx-pro-6000"])
@pytest.mark.parametrize("dims", [LLAMA, MIXTRAL, GPT2], ids=["llama", "mixtral", "gpt2"])
def test_never_slower_than_megatron(dims: Dims, name: str, tp: int, call: tuple[int, int, bool]) -> None:
    machine = read_machine(name)
    auto, ours = solved(dims, call, tp, "auto", machine)
    _, theirs = solved(dims, call, tp, megatron_plan(dims, whole_head=False), machine)
    assert ours <= theirs * 1.0001  # ties
    if call == DECODE:
        assert len(list(sent_by(auto))) <= 2 * LAYERS + 1


@in_long_runs
def test_the_table_of_decisions() -> None:
    """A line of docs/decisions.md, on every machine. If not: python -m tools.bench_decisions"""
    (call,) = (call for call in find_calls() if (call.model, call.name) == ("Llama 8B", "decode, batch 8"))
    cells = list(decide_call(call))
    assert {cell.machine for cell in cells} == find_machines(8).keys()
    assert [cell for cell in cells if cell.ratio > EVEN] == []
    assert {cell.machine for cell in cells if cell.sends > 2} == {"ideal"}
    *_, line = render_table(cells)
    assert line in (ROOT / "docs" / "decisions.md").read_text(encoding="utf-8").splitlines()


def test_a_decode_is_megatrons() -> None:
    """Two all_reduce a layer, where links without latency gave six collectives."""
    found, _ = solved(LLAMA, DECODE, 8, "auto", read_machine("h100"))
    assert Counter(kind for kind, _, _ in sent_by(found)) == {"all_reduce": 2 * LAYERS, "all_gather": 1}
    assert found.styles["layers.1.attention.o"] == found.styles["layers.1.mlp.down"] == "rowwise"


@pytest.mark.slow
def test_calls_decide_between_programs_that_want_different_plans() -> None:
    """Prefill wants few bytes, decode few collectives: one of them is worse off, the one that is called less."""
    programs = [exported(LLAMA, 8, 1024, is_decode) for is_decode in (False, True)]
    # each by itself: their caches differ in length, which no model's do
    machine = read_machine("rtx-pro-6000")
    each = [Request(program, 8, machine=machine) for program in programs]
    conversions = [own for request in each for own in request.conversions().values()]
    times = {}
    for calls in ((1.0, 1.0), (1.0, 256.0), (256.0, 1.0)):
        found = find_placements([own.with_asked(calls=n) for own, n in zip(conversions, calls, strict=True)])
        each = [dataclasses.replace(found, programs=[program]) for program in found.programs]
        times[calls] = [measure_step_time(one, machine).total for one in each]
    prefill, decode = zip(*times.values(), strict=True)
    assert prefill[2] == min(prefill) < prefill[1]
    assert decode[1] == min(decode) < decode[2]


def test_a_program_says_what_it_would_take_alone() -> None:
    made = tpcompiler.parallelize({"a": mlp(), "b": mlp()}, 2, "auto")
    alone = tpcompiler.parallelize(mlp(), 2, "auto").report().partition("one call takes ")[2].partition(" (")[0]
    for program in made.values():
        said = f"placed alone, a call of this program would take {alone}"
        assert said in [note.text for note in program.converted.notes]


def test_calls_are_of_the_programs() -> None:
    programs = {"prefill": mlp(), "decode": mlp()}
    for weights in ({"prefill": 1}, {"prefill": 1, "decode": 0}, {"prefill": 1, "decode": float("nan")}):
        with pytest.raises(PlanError, match="and the programs are prefill, decode"):
            tpcompiler.parallelize(programs, 2, "auto", weights=weights)
    with pytest.raises(PlanError, match="and the programs are one"):
        tpcompiler.find_plan(mlp(), 2, weights={"prefill": 1})


@pytest.mark.slow
def test_a_plan_changes_no_price(tmp_path: Path) -> None:
    """The plan that the search finds gives its time, and another one no less."""
    machine = read_machine("ideal")
    times = {
        str(plan): measure_step_time(found, machine).total
        for plan in ("auto", {"up": "colwise", "down": "rowwise"}, {"up": "colwise", "down": "colwise"})
        for found in [find_placements([*Request(mlp(), 2, plan, machine=machine).conversions().values()])]
    }
    auto, same, other = times.values()
    assert auto == pytest.approx(same)
    assert other > auto
