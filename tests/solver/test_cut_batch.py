"""The batch of inputs and outputs, where its placement is left to the search."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim, ExportedProgram, export

import tpcompiler
from tests.runtime.commands import right
from tpcompiler.errors import PlanError
from tpcompiler.runtime.weightless import weightless

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))


class Tower(nn.Module):
    """Its mask has no batch, and one of its outputs neither."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.down(self.up(x).relu()) * mask
        return {"h": h, "mean": h.mean(0)}


def tower(dynamic: bool = False) -> ExportedProgram:
    torch.manual_seed(0)
    sizes = {"x": {0: Dim("batch", min=2, max=64)}, "mask": None} if dynamic else None
    return export(Tower(), (X, torch.rand(16)), dynamic_shapes=sizes)


def seconds(program: tpcompiler.ParallelProgram) -> float:
    return program.cost().step.total


@pytest.mark.slow
def test_four_linears() -> None:
    """As many FLOPs as a step has, so that whoever leaves an axis idle doubles it: a plan leaves dp idle, the search not."""
    with weightless():
        model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(4)))
        exported = export(model, (torch.zeros(8192, 4096),))
    mesh = {"dp": 2, "tp": 2}  # over both: weights are whole then, and nothing is sent
    whole, cut = (tpcompiler.parallelize(exported, mesh, inputs=inputs, machine="h100") for inputs in (None, "auto"))
    idle = tpcompiler.parallelize(exported, mesh, {"**": "replicate"}, machine="h100")
    assert seconds(cut) < 0.27 * seconds(idle)
    assert seconds(whole) < 0.8 * seconds(idle)
    assert "over dp ranks share the batch of inputs that are equal on all of them" in whole.report()
    (output,) = (row.name for row in cut.manifest().outputs)
    both = {"dp": "S(0)", "tp": "S(0)"}
    placed: dict[str, Any] = {"inputs": {"input": both}, "outputs": {output: both}}
    by_hand = tpcompiler.parallelize(exported, mesh, **placed, machine="h100")
    assert seconds(cut) == seconds(by_hand)
    assert "the batch is cut over dp and tp: " in str(cut.report())
    over_one = tpcompiler.parallelize(exported, 4, inputs="auto", machine="h100")  # as the caller has no other axis
    assert seconds(over_one) == seconds(cut)


def test_ranks_share_the_batch_of_equal_inputs() -> None:
    """Inputs and outputs stay whole on all ranks; a plan for the layers leaves an axis without inputs alone."""
    made, planned = (
        tpcompiler.parallelize(tower(), {"dp": 2, "tp": 2}, plan, machine="ideal")
        for plan in ("auto", {"**": "replicate"})
    )
    shared = "over dp ranks share the batch of inputs that are equal on all of them"
    assert [shared in str(each.report()) for each in (made, planned)] == [True, False]
    rows = made.manifest()
    assert {row.sharding for row in (*rows.inputs, *rows.outputs) if row.sharding is not None} <= {
        "[R, R]",
        "[R]",
        "[]",
    }
    assert {own.axis for own in planned.collectives()} == set()
    assert any("dp" in own.axis for own in made.collectives())
    assert made.verify((X, torch.rand(16))).ok


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_numbers_are_right(dynamic: bool) -> None:
    made = tpcompiler.parallelize(tower(dynamic), {"dp": 2, "tp": 2}, inputs="auto", machine="ideal")
    rows = made.manifest()
    placed = {row.name: row.sharding for row in (*rows.inputs, *rows.outputs)}
    assert placed == {"x": "[S(0), R]", "mask": "[R, R]", "h": "[S(0), R]", "mean": "[R, R]"}
    assert (rows.asked.inputs, rows.asked.outputs) == ({"x": {"dp": "S(0)"}}, {"h": {"dp": "S(0)"}})
    assert made.verify((X, torch.rand(16))).ok


def test_what_the_caller_says_of_outputs_holds() -> None:
    made = tpcompiler.parallelize(
        tower(), {"dp": 2, "tp": 2}, inputs="auto", outputs={"h": {"tp": "S(1)"}}, machine="ideal"
    )
    placed = {row.name: row.sharding for row in made.manifest().outputs}
    assert placed == {"h": "[R, S(1)]", "mean": "[R, R]"}
    assert made.verify((X, torch.rand(16))).ok


def test_where_nothing_is_gained_the_batch_is_whole() -> None:
    """On a real machine, so small a model takes longer over more ranks."""
    made = tpcompiler.parallelize(tower(), {"dp": 2, "tp": 1}, inputs="auto")
    assert [row.sharding for row in made.manifest().inputs] == ["[R, R]", "[R, R]"]
    assert "the batch is whole: " in str(made.report())


@pytest.mark.slow
def test_programs_that_share_weights() -> None:
    """One leaves its inputs to the search, the other does not."""
    programs: Any = {"one": tower(), "two": tower()}
    made = tpcompiler.parallelize(programs, {"dp": 2, "tp": 2}, inputs={"one": "auto"}, machine="ideal")
    placed = {name: made[name].manifest().inputs[0].sharding for name in programs}
    assert placed == {"one": "[S(0), R]", "two": "[R, R]"}
    found = tpcompiler.find_plan(programs, {"dp": 2, "tp": 2}, inputs="auto", machine="ideal")
    assert found.to_data()


def test_stages_are_placed_by_hand() -> None:
    with pytest.raises(PlanError, match="inputs='auto' on a mesh with the axis pp"):
        tpcompiler.parallelize(tower(), {"pp": 2, "tp": 1}, {}, inputs="auto")
    with pytest.raises(PlanError, match="inputs='auto' where meshes are compared"):
        tpcompiler.diagnose(tower(), inputs="auto")
    with pytest.raises(PlanError, match="inputs='auto' where meshes are compared"):
        tpcompiler.diagnose({"one": tower(), "two": tower()}, inputs={"one": "auto"})
    with pytest.raises(PlanError, match="outputs='auto' is neither a mapping of names nor a list"):
        tpcompiler.parallelize(tower(), 2, outputs="auto")


def test_on_the_command_line(tmp_path: Path) -> None:
    torch.export.save(tower(), tmp_path / "model.pt2")
    words = ("--mesh", "dp=2,tp=2", "--machine", "ideal", "--plan", "auto", "--input", "auto", "--dry-run")
    assert "the batch is cut over dp: " in right("convert", tmp_path / "model.pt2", *words)
