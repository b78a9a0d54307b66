"""All commands predict the same time of a call, and say what cutting more of a model would cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tpcompiler
from tests.solver.test_auto import mlp
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
