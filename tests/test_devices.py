"""Converted on the CPU for CUDA: what the files say, and how they are proved where there is no GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.export.passes import move_to_device_pass

import tpcompiler
from tests.devices import MODELS, devices_in_file, exported, other_devices
from tests.runtime.commands import right
from tests.runtime.models import PLAN_TEXT, export_mlp
from tpcompiler.judge.compare.simulate import simulate
from tpcompiler.judge.compare.trial import run_single
from tpcompiler.parallel.program_subject import compared_calls, subject_of
from tpcompiler.runtime.artifact import read_manifest
from tpcompiler.runtime.inputs import read_inputs, write_tensors

NOTE = "run on cpu: the same graphs as those for cuda, with the device renamed"


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_file_for_cuda(name: str, tmp_path: Path) -> None:
    """Every device in the graph is `cuda` without an index; tensors are stored from the CPU, for any GPU to take."""
    program, plan, inputs = exported(name)
    made = tpcompiler.parallelize(program, 2, plan, device_type="cuda")
    made.save(tmp_path / "out")
    assert read_manifest(tmp_path / "out").device_type == "cuda"
    for rank in range(2):
        said = devices_in_file(tmp_path / "out" / f"rank_{rank}.pt2")
        assert said.pop("model.json") == {("cuda", None)}
        assert all(devices == {("cpu", None)} for devices in said.values())
        loaded = torch.export.load(tmp_path / "out" / f"rank_{rank}.pt2")
        assert other_devices(loaded, "cuda") == []
        assert {value.device.type for value in loaded.state_dict.values()} == {"cpu"}
    report = tpcompiler.open(tmp_path / "out").verify(inputs, original=program)
    assert (report.ok, report.note) == (True, NOTE)


@pytest.mark.slow
def test_a_literal_in_a_file_is_found(tmp_path: Path) -> None:
    """The negative control of the search in files."""
    program, plan, _ = exported("literals")
    rank = tpcompiler.parallelize(program, 2, plan, device_type="cuda").rank_program(0)
    next(node for node in rank.graph.nodes if node.name == "arange").update_kwarg("device", torch.device("cpu"))
    torch.export.save(rank, tmp_path / "rank.pt2")
    # The literal, and the index that torch gives a fake tensor, which `save` takes away.
    assert devices_in_file(tmp_path / "rank.pt2")["model.json"] == {("cpu", None), ("cuda", None), ("cuda", 0)}


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("world", [2, 4])
def test_proved_on_the_cpu(name: str, world: int) -> None:
    program, plan, inputs = exported(name)
    report = tpcompiler.parallelize(program, world, plan, device_type="cuda").verify(inputs)
    assert report.ok, report
    assert str(report).splitlines()[1] == f"  {NOTE}"
    assert tpcompiler.parallelize(program, world, plan).verify(inputs).note == ""


@pytest.mark.slow
def test_the_proof_can_fail() -> None:
    program, plan, inputs = exported("mlp")
    made = tpcompiler.parallelize(program, 2, plan, device_type="cuda")
    ranks = [made.rank_program(rank) for rank in range(2)]
    subject = replace(subject_of(made.only), reference=program, programs=ranks)
    assert compared_calls({"": subject}, [("", inputs, {})]).ok
    for rank in ranks:
        (call,) = (node for node in rank.graph.nodes if "all_reduce" in node.name)
        call.update_arg(1, "max")
    report = compared_calls({"": subject}, [("", inputs, {})])
    assert (report.ok, report.note) == (False, NOTE)
    assert report.first_diverging is not None


@pytest.mark.slow
def test_torch_alone_puts_a_file_on_its_device(tmp_path: Path) -> None:
    """What the README says for those who load without this package, with the CPU for a GPU."""
    program, plan, inputs = exported("literals")
    tpcompiler.parallelize(program, 2, plan, device_type="cuda").save(tmp_path / "out")
    loaded = [torch.export.load(tmp_path / "out" / f"rank_{rank}.pt2") for rank in range(2)]
    with torch.no_grad():  # a torch without CUDA aborts where gradients meet a fake tensor on it
        ranks = [move_to_device_pass(rank, "cpu") for rank in loaded]
    assert [other_devices(rank, "cpu") for rank in ranks] == [[], []]
    expected = run_single(program.run_decompositions({}), inputs).outputs
    for rank in simulate(ranks, [inputs, inputs]):
        for got, want in zip(rank.outputs, expected, strict=True):
            torch.testing.assert_close(got, want)


@pytest.mark.slow
def test_the_graph_does_not_depend_on_the_device() -> None:
    """Collectives, their order and their bytes are those of the program for the CPU."""
    for name in MODELS:
        program, plan, _ = exported(name)
        one, two = (tpcompiler.parallelize(program, 2, plan, device_type=kind) for kind in ("cpu", "cuda"))
        assert one.collectives() == two.collectives()
        ops = [[(n.name, n.op) for n in made.rank_program(1).graph.nodes] for made in (one, two)]
        assert ops[0] == ops[1]


def test_the_drop_in_leaves_weights_where_they_can_run() -> None:
    program, plan, _ = exported("mlp")
    made = tpcompiler.tensor_parallel_transformation(program, 1, 2, "cuda", plan)
    assert other_devices(made, "cuda") == []
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert {value.device.type for value in made.state_dict.values()} == {expected}


def test_the_commands(tmp_path: Path) -> None:
    model, plan, out = tmp_path / "model.pt2", tmp_path / "plan.yaml", tmp_path / "out"
    torch.export.save(export_mlp(), model)
    plan.write_text(PLAN_TEXT)
    said = right("convert", model, "--tp", 2, "--plan", plan, "--device", "cuda", "-o", out)
    assert said.startswith(f"{out}: mesh tp=2, 2 ranks, cuda\n")
    assert devices_in_file(out / "rank_1.pt2")["model.json"] == {("cuda", None)}
    assert right("verify", out, "--against", model).splitlines()[1] == f"  {NOTE}"
    assert '"device_type": "cuda"' in right("inspect", out, "--json")
    assert "all_reduce" in right("inspect", out, "--rank", 0)
    old = right("convert", model, "--tp", 2, "--plan", plan, "--device", "cpu", "-o", tmp_path / "old")
    assert ", cpu\n" in old


@pytest.mark.slow
def test_inputs_go_to_the_type_of_device_that_the_program_takes(tmp_path: Path) -> None:
    """To the current device of that type, not to the index that a fake tensor has."""
    program, plan, inputs = exported("mlp")
    write_tensors(tmp_path / "in", {"x": inputs[0]})
    made = tpcompiler.parallelize(program, 2, plan, device_type="cuda").rank_program(0)
    asked = []

    def to(self: torch.Tensor, device: object) -> torch.Tensor:
        asked.append(device)
        return self

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "to", to)
        read_inputs(tmp_path / "in", made)
    assert asked == ["cuda"]
