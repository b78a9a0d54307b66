"""`verify` with steps of an optimizer: the parameters of all ranks are those of the single device after each step."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tpcompiler
from tests.runtime.commands import right
from tests.training.test_gradients import ROWS, Dropped, built, squares
from tests.zoo.faults import collectives_of, without_collective
from tpcompiler.judge.compare.steps import _Parameters
from tpcompiler.parallel.compared import compared_calls, subject_of
from tpcompiler.runtime.artifact import SINGLE

PLANS = {
    "mlp": {"gate": "colwise", "up": "colwise", "down": "rowwise"},
    "images": {"first": "colwise", "second": "S(0)", "head": "rowwise"},
    "tied": {"embed": "embedding_rowwise"},
}
INPUTS = {"mlp": ["x", "labels"], "images": ["x", "labels"], "tied": ["ids", "labels"]}


def converted(name: str) -> tuple[tpcompiler.ParallelProgram, Any, Any]:
    _, program, args, named = built(name)
    inputs = dict.fromkeys(INPUTS[name], ROWS)
    return tpcompiler.parallelize(program, {"dp": 2, "tp": 2}, PLANS[name], inputs=inputs), args, named


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_parameters_after_each_step(name: str, optimizer: str) -> None:
    """A bias before a batch norm has a gradient of rounding alone, which AdamW makes a step of full length of."""
    made, args, named = converted(name)
    report = made.verify(args, named, steps=3, optimizer=optimizer)
    assert report.ok, str(report)
    after = [each for each in report.outputs if each.name.endswith(f" after {optimizer}")]
    parameters = [row for row in made.manifest().tensors if row.kind == "parameter" and row.tied_to is None]
    without_gradient = 3 if name == "tied" else 0  # the unused layer's two, and the frozen scale
    assert len(after) == 3 * (len(parameters) - without_gradient)
    exact = [each for each in after if each.name.partition(": ")[2] != f"first.bias after {optimizer}"]
    assert max(each.tolerance for each in exact) < 1e-3  # of which a wrong step of 1e-3 in values up to 0.4 is twice


@pytest.mark.sample(1)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_in_narrow_floats_and_with_random_numbers(optimizer: str) -> None:
    torch.manual_seed(0)
    x, labels = torch.randn(4, 6, 8), torch.randn(4, 6, 8)
    program = tpcompiler.export_training(Dropped().train(), (x,), loss=squares, targets={"labels": labels})
    made = tpcompiler.parallelize(program, 2, {"out": "rowwise"})
    report = made.verify((x,), {"labels": labels}, steps=3, optimizer=optimizer)
    assert report.ok, str(report)
    assert any(each.name.endswith(f"after {optimizer} in float32") for each in report.outputs)


def test_without_any_collective_it_is_wrong() -> None:
    """AdamW's step has the same length for any multiple of a gradient, so SGD's is asked for."""
    made, args, named = converted("mlp")
    subject = subject_of(made.only)
    call = (SINGLE, args, named)
    for each in collectives_of(subject.programs[0]):
        damaged = replace(subject, programs=[without_collective(rank, each) for rank in subject.programs])
        report = compared_calls({SINGLE: damaged}, [call, call], "sgd")
        assert not report.ok, each
        wrong = [other.name for other in report.outputs if not other.ok]
        graded = {name.partition("gradients.")[2] for name in wrong if "gradients." in name}
        assert graded <= {name.partition(": ")[2].removesuffix(" after sgd") for name in wrong if "after" in name}


def test_a_rank_that_makes_another_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradients are right, and so is the first step's loss: only the parameters show it."""
    made, args, named = converted("mlp")
    subject, own, count = subject_of(made.only), _Parameters.step, 0

    def step(self: _Parameters, gradients: Any) -> Any:
        nonlocal count
        count += 1
        if count == 6:  # of the single device, the same in float64, and four ranks
            gradients = {name: -value for name, value in gradients.items()}
        return own(self, gradients)

    monkeypatch.setattr(_Parameters, "step", step)
    report = compared_calls({SINGLE: subject}, [(SINGLE, args, named)], "adamw")
    assert [each.name for each in report.outputs if not each.ok] == [
        f"step 1: {layer}.{kind} after adamw" for layer in ("gate", "up", "down") for kind in ("weight", "bias")
    ]
    lines = str(report).splitlines()
    assert lines[0].startswith("NOT EQUAL: ")
    assert lines[1].startswith("  BAD step 1: gate.weight after adamw: rel err 0.00")
    assert lines[-1].startswith("  ok  step 1: 8 values, of which the least exact is ")


@pytest.mark.slow
def test_by_the_command_line(tmp_path: Path) -> None:
    made, _, _ = converted("mlp")
    made.save(tmp_path / "out")
    said = right("verify", str(tmp_path / "out"), "--steps", "2", "--optimizer", "sgd")
    assert "  ok  step 1: 14 values" in said
    assert "  ok  step 2: 14 values" in said
    answer = json.loads(right("verify", str(tmp_path / "out"), "--steps", "2", "--json"))
    assert (answer["ok"], answer["steps"], len(answer["outputs"])) == (True, 2, 28)
