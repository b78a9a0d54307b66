"""All commands predict the same time of a call, and say what cutting more of a model would cost."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.export import ExportedProgram, export

import tpcompiler
from tests.solver.test_auto import Mlp, mlp
from tests.views.opened import page_data
from tests.zoo.index import CASES
from tpcompiler.cost.machine_file import read_machine
from tpcompiler.cost.timeline import StepTime, duration

MACHINE = "ideal"


def said(made: tpcompiler.ParallelProgram, kind: str) -> list[str]:
    return [note.text for note in made.converted.notes if note.kind == kind]


def all_of(directory: Path, weight: str, machine: str) -> list[StepTime]:
    """What each command that reads an artifact predicts for one call."""
    step = StepTime(**page_data(directory, machine=machine)["step"])
    both = [
        tpcompiler.open(directory).cost(machine=machine).step,
        *tpcompiler.open(directory).diff(tpcompiler.open(directory), machine=machine).steps,
    ]
    assert step.total == tpcompiler.open(directory).explain(weight, machine=machine).seconds
    return [step, *both]


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("optimize", ["latency", "memory"])
@pytest.mark.parametrize("machine", ["ideal", "h100"])
def test_every_command_predicts_the_same(machine: str, optimize: Any, tmp_path: Path) -> None:
    """The note of a conversion, doctor, cost, diff, explain and the page: of copies and masks too."""
    program = CASES["llama"].export(False)
    made = tpcompiler.parallelize(program, 2, "auto", machine=machine, optimize=optimize)
    made.save(tmp_path / "out")
    step, *rest = all_of(tmp_path / "out", "lm_head.weight", machine)
    assert rest == [step] * 3
    assert said(made, "search")[0] == f"one call {step.text} on {machine}"
    if optimize == "latency":
        two = tpcompiler.diagnose(program, machine=machine).meshes["tp=2"]
        assert two.seconds["model"] == step


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("machine", ["ideal", "h100"])
def test_so_they_do_of_several_programs(machine: str, tmp_path: Path) -> None:
    model = Mlp()
    programs = {name: export(model, (torch.randn(2, steps, 64),)) for name, steps in (("prefill", 8), ("decode", 1))}
    made = tpcompiler.parallelize(programs, 2, "auto", machine=machine)
    made.save(tmp_path / "out")
    two = tpcompiler.diagnose(programs, machine=machine).meshes["tp=2"]
    for name, program in made.items():
        step, *rest = all_of(tmp_path / "out" / name, "up.weight", machine)
        assert [*rest, two.seconds[name]] == [step] * 4
        assert said(program, "search")[0] == f"one call {step.text} on {machine}"


def test_layers_that_stay_whole_by_hand() -> None:
    """Cut alone, `up` saves the time of half of its weight and results, and these are gathered once."""
    made, machine = tpcompiler.parallelize(mlp(), 2, "auto", machine="h100"), read_machine("h100")
    saved = (64 * 128 + 16 * 128) * 4 + 2 * 16 * 128 * 4  # bytes of up, and of relu
    more = machine.collective_seconds("all_gather", ["tp"], 16 * 128 * 4, made.mesh) - saved / machine.memory_bandwidth
    up, down, *helps = said(made, "uncut")
    assert up == f"up: 65.5 kB on every rank; cut, a call takes {duration(more)} more, and a rank holds 32.8 kB less"
    assert down.startswith("down: 65.5 kB on every rank; cut, a call takes ")
    assert ["--optimize memory" in helps[0], "--machine ideal" in helps[1]] == [True, True]
    assert f"  {up}\n" in made.report()


@pytest.mark.slow
def test_nothing_is_said_where_all_is_cut_or_a_plan_decides() -> None:
    assert not said(tpcompiler.parallelize(mlp(), 2, "auto", machine="ideal"), "uncut")
    assert not said(tpcompiler.parallelize(mlp(), 2, "auto", machine="h100", optimize="memory"), "uncut")
    assert not said(tpcompiler.parallelize(mlp(), 2, {"up": "replicate"}, machine="h100"), "uncut")


class Deep(torch.nn.Module):
    """Two blocks, and a head that is worth cutting where they are not."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.Sequential(Mlp(), Mlp())
        self.head = torch.nn.Linear(64, 1 << 20, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x))[..., :64].sum(-1)


def deep() -> ExportedProgram:
    with tpcompiler.weightless():
        return export(Deep(), (torch.randn(2, 8, 64),))


@pytest.mark.slow
def test_repeated_layers_are_one_line_and_a_plan_that_was_found_says_the_same() -> None:
    made = tpcompiler.parallelize(deep(), 2, "auto", machine="h100")
    found = said(made, "uncut")
    assert made.converted.plan.to_data()["head"] == "colwise"
    assert re.match(
        r"blocks\.\*: 262 kB on every rank; cut, a call takes 12\.\d us more, and a rank holds 131 kB less$", found[0]
    )
    again = tpcompiler.parallelize(deep(), 2, made.converted.plan, machine="h100")
    assert said(again, "uncut") == found


@pytest.mark.slow
def test_fewest_bytes_cut_what_a_collective_costs_more_than() -> None:
    """On a machine where an all_reduce takes longer than reading these weights a thousand times."""
    made = tpcompiler.parallelize(CASES["llama"].export(False), 2, "auto", machine="h100", optimize="memory")
    assert "replicate" not in made.converted.plan.to_data().values()
