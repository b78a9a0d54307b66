"""Inputs and outputs with placements of their own: batch-sharded inputs, sharded outputs, static and dynamic."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.export import Dim, ExportedProgram

import tpcompiler
from tpcompiler import ParallelProgram

Given = dict[str, str]


class Model(torch.nn.Module):
    """Every use of a batch size: in views, as a factory's size, as a number, as an output; reductions over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)
        for parameter in self.parameters():
            torch.nn.init.normal_(parameter, std=0.3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor | int, ...]:
        batch, length = x.shape[:2]
        hidden = self.down(torch.relu(self.up(x)))
        z = hidden.view(batch, length, 8).transpose(1, 2).softmax(-1)
        row = torch.arange(batch, dtype=x.dtype)
        wide = y[:, None].expand(batch, 8) * row[:, None]
        return hidden, z, y + batch, wide, x.mean(0), hidden.sum((0, 1)), batch


def exported(batch: Dim | None = None) -> ExportedProgram:
    """Dynamic in the batch and the length where a batch is given."""
    torch.manual_seed(0)
    sizes = {"x": {0: batch, 1: Dim("length", min=2, max=512)}, "y": {0: batch}} if batch is not None else None
    return torch.export.export(Model(), (torch.randn(4, 4, 8), torch.randn(4)), dynamic_shapes=sizes)


def inputs(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * batch + length)
    return torch.randn(batch, length, 8, generator=generator), torch.randn(batch, generator=generator)


WHOLE = {"up": "replicate", "down": "replicate"}
CUT = {"up": "colwise", "down": "rowwise"}
ALL = {"x": "S(0)", "y": "S(0)"}
BATCH_OUT = {"0": "S(0)", "1": "S(0)", "2": "S(0)", "3": "S(0)"}
BOUNDARIES: dict[str, tuple[dict[str, str], Given, Given, dict[str, int]]] = {
    # Gathered are x and y, of which all is made whole: fewer bytes than gathers and sums of what is made of them.
    "a whole input beside a cut one": (WHOLE, {"x": "S(0)"}, {}, {"all_gather": 1}),
    "both inputs": (WHOLE, ALL, {}, {"all_gather": 2}),
    "both inputs and the outputs": (WHOLE, ALL, BATCH_OUT, {"all_reduce": 2}),
    "outputs only": (CUT, {}, {"0": "S(0)", "2": "S(0)"}, {"all_reduce": 1}),
    "another dim of an output": (
        WHOLE,
        {"x": "S(0)"},
        {"1": "S(2)"},
        {"all_gather": 1},
    ),
}


@pytest.fixture(scope="module")
def programs() -> dict[str, ExportedProgram]:
    return {"static": exported(), "dynamic": exported(Dim("batch", min=1, max=64))}


def converted(program: ExportedProgram, name: str, world: int) -> ParallelProgram:
    plan, ins, outs, _ = BOUNDARIES[name]
    return tpcompiler.parallelize(program, world, plan, inputs=ins, outputs=outs)


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("name", BOUNDARIES)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("sizes", ["static", "dynamic"])
def test_right_at_the_hand_counted_cost(
    programs: dict[str, ExportedProgram], sizes: str, world: int, name: str
) -> None:
    program = converted(programs[sizes], name, world)
    for batch, length in [(4, 4)] if sizes == "static" else [(4, 4), (world, 8), (12, 20)]:
        report = program.verify(inputs(batch, length))
        assert report.ok, str(report)
    assert Counter(c.kind for c in program.collectives()) == BOUNDARIES[name][3]
    assert not [c for c in program.collectives() if c.why == "fallback"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("sizes", ["static", "dynamic"])
def test_a_rank_program_has_its_own_part_of_the_examples(programs: dict[str, ExportedProgram], sizes: str) -> None:
    """Compilers take the example inputs from the program."""
    program = converted(programs[sizes], "both inputs", 2)
    assert programs[sizes].example_inputs is not None
    (x, y), _ = programs[sizes].example_inputs
    made = program.rank_program(1)
    assert made.example_inputs is not None
    (own_x, own_y), _ = made.example_inputs
    assert torch.equal(own_x, x[2:])
    assert torch.equal(own_y, y[2:])
    odd = torch.export.export(Model(), inputs(3, 4), dynamic_shapes={"x": {0: Dim("b")}, "y": {0: Dim("b")}})
    assert tpcompiler.parallelize(odd, 2, WHOLE, inputs=ALL).rank_program(0).example_inputs is None


def test_a_size_that_the_ranks_do_not_divide(programs: dict[str, ExportedProgram]) -> None:
    """An error for the simulator; and an error, not a dropped row, where a whole value is cut."""
    with pytest.raises(tpcompiler.InputsError) as raised:
        converted(programs["dynamic"], "both inputs", 2).verify(inputs(5, 4))
    assert str(raised.value) == "input 'x' has 5 on dim 0, which is cut by 2 ranks\n  help: give a multiple of 2"
    with pytest.raises(tpcompiler.InputsError, match="is invalid for input of size"):
        converted(programs["dynamic"], "outputs only", 2).verify(inputs(5, 4))


class Beside(torch.nn.Module):
    """The export writes down that both inputs have one batch."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, y + x.shape[0]


def test_guards_of_the_export_do_not_hold_for_a_cut_input() -> None:
    """A rank takes its own rows of one input and all rows of the other, whose sizes were equal in the export."""
    batch = Dim("batch", min=2, max=64)
    x, y = torch.randn(6, 3), torch.randn(6)
    program = torch.export.export(Beside(), (x, y), dynamic_shapes={"x": {0: batch}, "y": {0: batch}})
    assert tpcompiler.parallelize(program, 2, {}).rank_program(0)._guards_code, "the export has such a guard"
    made = tpcompiler.parallelize(program, 2, {}, inputs={"x": "S(0)"}, outputs={"0": "S(0)"})
    rows, whole = made.rank_program(1).module()(x[3:], y)  # with its guards; no collective, so no group
    assert torch.equal(rows, x[3:] * 2)
    assert torch.equal(whole, y + 6)


class Counting(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total.add_(x.sum(0))
        return x + self.total


def test_whole_is_whole_on_every_axis() -> None:
    """And the ranks that cut a dim are those of its axes: replicas on the others are no more of it."""
    rows = torch.export.export(Counting(), (torch.randn(4, 3),), dynamic_shapes=({0: Dim("rows")},))
    program = tpcompiler.parallelize(rows, {"dp": 2, "tp": 2}, {}, inputs=[{"dp": "S(0)"}], outputs=["R"])
    assert program.manifest().outputs[0].sharding == "[R, R]"
    whole = tpcompiler.parallelize(rows, {"dp": 2, "tp": 2}, {}, inputs=["R"])
    assert whole.manifest().inputs[0].sharding == "[R, R]"
    with pytest.raises(tpcompiler.TpCompilerError) as raised:
        program.verify((torch.randn(3, 3),))
    assert str(raised.value) == "input 'x' has 3 on dim 0, which is cut by 2 ranks\n  help: give a multiple of 2"


class Merged(torch.nn.Module):
    """A reshape that counts the elements of what is cut: torch writes their number over the other sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 12), torch.nn.Linear(3, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.down(self.up(x).transpose(0, 1).reshape(-1, 4, 3).softmax(1))
        return made


@pytest.mark.sample(1)
@pytest.mark.parametrize("world", [2, 4])
def test_the_number_of_elements_is_that_of_the_whole(world: int) -> None:
    exported = torch.export.export(Merged(), (torch.randn(2, 5, 8),), dynamic_shapes=({0: Dim.AUTO, 1: Dim.AUTO},))
    program = tpcompiler.parallelize(exported, world, {"up": "colwise"})
    assert program.verify((torch.randn(2, 5, 8),)).ok
    assert program.verify((torch.randn(3, 7, 8),)).ok


class Asserting(torch.nn.Module):
    """A number that the data decide, and that the program asserts: the export takes it for known."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(8, 12)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        torch._check((mask.sum() == 3).all().item())
        made: torch.Tensor = self.up(x)
        return made


def test_what_is_asserted_is_known(tmp_path: Path) -> None:
    exported = torch.export.export(Asserting(), (torch.randn(5, 8), torch.arange(4) < 3))
    assert any("sym_ite" in str(node.target) for node in exported.graph.nodes)
    tpcompiler.parallelize(exported, 2, {"up": "colwise"}).save(tmp_path / "out")  # checked
