"""Packages: the numbers on all ranks, one model for ranks that are alike, what a caller meets, and ranks that die."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tpcompiler
from tests.launch import fork_judged
from tests.runtime import faults, packages
from tests.runtime.commands import call
from tests.test_json import read
from tpcompiler import ArtifactError, InputsError, TpCompilerWarning, UnsupportedError
from tpcompiler._torch import inductor
from tpcompiler.judge.compare import processes
from tpcompiler.runtime.artifact import read_manifest
from tpcompiler.runtime.package import read_package
from tpcompiler.terminal.progress import listening


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/test_deploy.py has a package that is checked as for users, by torchrun."""
    monkeypatch.setattr(processes, "run_ranks", fork_judged)


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("package") / "out"
    packages.write(directory)
    return directory


@pytest.fixture
def world_of_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.slow
def test_ranks_that_are_not_alike_have_models_of_their_own(every: Path) -> None:
    """A vocabulary of 7 on 3 ranks; a buffer and an input that are written; outputs that are no tensors."""
    told: list[tuple[str, int, int]] = []
    with listening(lambda step, *rest: told.append(rest) if step == "compiling" else None):
        made, report = tpcompiler.open(every).package()
    assert told == [("models", done, 2) for done in range(3)]
    assert report is not None
    assert report.ok, str(report)
    assert [each.name for each in report.outputs] == ["0", "1", "2", "3", "calls", "total"]
    assert made.models == {"model": {"model_0": [0, 1], "model_1": [2]}}
    assert read_package(every) == made
    assert {path.name for path in every.iterdir()} == {
        *("manifest.json", "model.pt2", "program_0.pt2", "program_1.pt2", "compiled.pt2", "runner.so"),
        *(f"compiled_model_{index}.pt2" for index in range(2)),
        *(f"rank_{rank}.safetensors" for rank in range(3)),
    }
    assert tpcompiler.open(every).check(packages.exported()).ok


@pytest.mark.slow
def test_every_kind_of_collective(tmp_path: Path) -> None:
    """Self-contained files, sharded at the boundary; no weight is there to be read."""
    made = packages.write_changes(tmp_path / "out")
    assert {c.kind for c in made.collectives()} == {"all_gather", "all_reduce", "reduce_scatter", "all_to_all"}
    result = call("package", tmp_path / "out", "--json")
    assert result.exit_code == 0, result.stderr
    said = json.loads(result.stdout)
    assert read("package", said)
    assert said["report"]["ok"]
    assert said["models"] == {"model": {"model_0": [0, 1]}}


@pytest.mark.slow
def test_a_package_that_is_wrong_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a reduction is left out of what is compiled."""
    compile_module = inductor.compile_module

    def without_reductions(module: torch.fx.GraphModule, args: Any, threads: int, **asked: Any) -> list[Any]:
        for node in module.graph.find_nodes(op="call_function", target=torch.ops._c10d_functional.all_reduce.default):
            (waited,) = node.users
            waited.replace_all_uses_with(node.args[0])
            module.graph.erase_node(waited)
            module.graph.erase_node(node)
        module.recompile()
        return compile_module(module, args, threads, **asked)

    packages.write_changes(tmp_path / "out")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    monkeypatch.setattr(inductor, "compile_module", without_reductions)
    result = call("package", tmp_path / "out")
    assert result.exit_code == 1
    assert result.stdout.startswith("NOT EQUAL")
    assert result.stderr == "the package is not right, and was deleted\n"
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("alone") / "out"
    packages.write(directory, 1)
    tpcompiler.open(directory).package(check=False)
    return directory


@pytest.mark.slow
@pytest.mark.usefixtures("world_of_one")
def test_it_is_called_as_the_program_is(alone: Path) -> None:
    """From call to call, in any memory layout, with the program's own errors."""
    compiled, plain = (tpcompiler.load(alone, compiled=way) for way in (True, False))
    for rows in (9, 4):
        ids, total = torch.arange(rows).remainder(7), torch.zeros(2 * rows)[::2]
        other = total.clone()
        made, wanted = compiled(ids, total), plain(ids, other)
        torch.testing.assert_close(made, wanted)
        torch.testing.assert_close(total, other)
        assert total.abs().sum() > 0
    torch.testing.assert_close(compiled.exported_program.state_dict["calls"], torch.full((1,), 2.0))
    for ids, total, said in (
        (torch.zeros(9), packages.SUM, r"input 'ids' is torch\.float32 \[9\], the program takes torch\.int64"),
        (torch.full((9,), 7), packages.SUM, "input 'ids' has the value 7, and may have 0 to 6"),
        (packages.IDS, packages.SUM.double(), r"input 'total' is torch\.float64 \[9\]"),
    ):
        with pytest.raises(InputsError, match=said):
            compiled(ids, total)
    with pytest.raises(InputsError, match="input 'ids' has the value 7, and may have 0 to 6"):
        plain(torch.full((9,), 7), packages.SUM)
    for module in (compiled, plain):
        with pytest.raises(InputsError, match="the export assumed that"):
            module(packages.IDS, torch.ones(8))


@pytest.mark.slow
@pytest.mark.usefixtures("world_of_one")
def test_weights_written_in_place_are_those_of_the_next_call(alone: Path) -> None:
    """As a handover writes them: the package reads the memory of the module's parameters."""
    compiled, plain = (tpcompiler.load(alone, compiled=it, trust=it) for it in (True, False))
    ids, total = packages.IDS, packages.SUM
    before = [module(ids, total.clone())[0].clone() for module in (compiled, plain)]
    for module in (compiled, plain):
        for value in module.parameters():
            value.detach().mul_(0.5)
    made, wanted = (module(ids, total.clone())[0] for module in (compiled, plain))
    assert not torch.allclose(made, 2 * before[0])
    torch.testing.assert_close(made, wanted)


@pytest.mark.slow
@pytest.mark.usefixtures("world_of_one")
def test_inputs_in_any_layout_and_outputs_that_are_none(alone: Path, tmp_path: Path) -> None:
    """Packaged in a process that has loaded another artifact."""
    tpcompiler.load(alone, compiled=False)
    packages.write_laid(tmp_path / "out")
    _, report = tpcompiler.open(tmp_path / "out").package()
    assert report is not None
    assert report.ok, str(report)
    programs = tpcompiler.load(tmp_path / "out", compiled=True)
    held = torch.zeros(3)
    for rows in (2, 5, 9):
        x = torch.arange(3.0 * rows).reshape(rows, 3) - 4
        for value in (x, x.t().contiguous().t(), x[:1].expand(rows, 3), torch.cat([x, x], 1)[:, :3]):
            made, written = programs["laid"](value)
            held += value.sum(0)
            assert torch.equal(made, value.relu() * 2)
            assert torch.equal(written, held)
            assert programs["silent"](value[:2]) is None
            held -= value[:2].sum(0)
    assert torch.equal(programs["laid"].exported_program.state_dict["held"], held)


@pytest.mark.slow
@pytest.mark.usefixtures("world_of_one")
def test_machine_code_is_not_run_unasked(alone: Path, tmp_path: Path) -> None:
    with pytest.warns(TpCompilerWarning, match="is machine code and runs only on request"):
        assert "aten.linear" in tpcompiler.load(alone).code
    assert "aten.linear" not in tpcompiler.load(alone, trust=True).code
    directory = tmp_path / "other"
    shutil.copytree(alone, directory)
    shutil.copy(directory / "manifest.json", directory / "runner.so")
    with pytest.raises(ArtifactError, match=r"runner\.so has SHA-256"):
        tpcompiler.load(directory, compiled=True)
    data = json.loads((directory / "manifest.json").read_text())
    data["compiled"]["models"] = {"model": {"model_0": [1]}}
    (directory / "manifest.json").write_text(json.dumps(data))
    with pytest.raises(ArtifactError, match="has no model of the program for rank 0"):
        tpcompiler.load(directory, compiled=True)


def test_numbers_at_the_boundary_are_refused(tmp_path: Path) -> None:
    class Scaled(torch.nn.Module):
        def forward(self, x: torch.Tensor, n: int) -> tuple[torch.Tensor, int]:
            return x * n, x.shape[0] + n

    sizes = {"x": {0: torch.export.Dim.DYNAMIC}, "n": torch.export.Dim.DYNAMIC}
    program = torch.export.export(Scaled(), (torch.ones(4, 2), 5), dynamic_shapes=sizes)
    tpcompiler.parallelize(program, 2, {}).save(tmp_path / "out")
    with pytest.raises(UnsupportedError, match="takes the number 'n', and a package takes tensors only"):
        tpcompiler.open(tmp_path / "out").package()
    assert not read_manifest(tmp_path / "out").compiled


@pytest.mark.slow
def test_a_rank_that_fails_ends_all(tmp_path: Path) -> None:
    directory, fault = faults.write_artifacts(tmp_path), "dies before calling"
    tpcompiler.open(directory).package(check=False)
    assert not faults.wrong(fault, faults.run_fault(directory, fault))
