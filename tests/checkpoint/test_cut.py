"""From a checkpoint to the ranks' weights: the same bytes as from a model that holds them."""

from __future__ import annotations

import copy
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.export import ExportedProgram, export

import tpcompiler
from tests.checkpoint.models import ARGS, PLAN, SIZES, Model, exported, hollow, model, write_checkpoint
from tests.launch import run_ranks
from tests.long import some
from tpcompiler import ArtifactError, ProgramError
from tpcompiler.checkpoint.files import Checkpoint
from tpcompiler.runtime.artifact import read_manifest, weights_file
from tpcompiler.runtime.model_file import read_model
from tpcompiler.runtime.program_files import open_program
from tpcompiler.runtime.rank_file import read_rank
from tpcompiler.runtime.weightless import weightless_names


@cache
def made(world: int, has_weights: bool) -> tempfile.TemporaryDirectory[str]:
    """The model's artifact, with weights or still to be cut: to be copied."""
    folder = tempfile.TemporaryDirectory()
    program, layout = (exported(), {"layout": "shared"}) if has_weights else (hollow(), {})
    tpcompiler.parallelize(program, world, PLAN).save(Path(folder.name) / "out", **layout)
    return folder


def converted(out: Path, world: int = 3, *, has_weights: bool = False) -> Path:
    return shutil.copytree(Path(made(world, has_weights).name) / "out", out)


def everything(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.iterdir()}


def weights(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.glob("rank_*")}


@pytest.mark.slow
@pytest.mark.sweep(2)
@pytest.mark.parametrize(("world", "prefix"), [(3, "model."), (4, "")])
def test_the_same_bytes_as_with_weights(world: int, prefix: str, tmp_path: Path) -> None:
    """Tied, cut unevenly, pending biases, a prefix that the program does not have."""
    converted(tmp_path / "whole", world, has_weights=True)
    out = converted(tmp_path / "out", world)
    assert not weights(out)
    tpcompiler.open(out).cut(write_checkpoint(tmp_path / "c", prefix))
    assert weights(out) == weights(tmp_path / "whole")
    assert tpcompiler.open(out).check(exported()).ok
    report = tpcompiler.open(out).verify(ARGS, original=exported())
    assert report.ok, str(report)
    assert sorted(path.name for path in out.iterdir() if path.name.startswith(".")) == []


@pytest.mark.slow
def test_a_wrong_checkpoint_is_not_equal(tmp_path: Path) -> None:
    """Negative control."""
    out = converted(tmp_path / "out")
    changed = {"layers.0.up.bias": model().layers[0].up.bias.detach() + 1}
    tpcompiler.open(out).cut(write_checkpoint(tmp_path / "c", **changed))
    assert not tpcompiler.open(out).verify(ARGS, original=exported()).ok
    assert not tpcompiler.open(out).check(exported()).ok


@pytest.mark.slow
def test_without_weights_everything_says_so(tmp_path: Path) -> None:
    """torch reads the same file with zeros, and without a word."""
    program = hollow()
    tpcompiler.save_weightless(program, tmp_path / "model.pt2")
    assert not torch.export.load(tmp_path / "model.pt2").state_dict["table.weight"].any()
    assert (tmp_path / "model.pt2").stat().st_size < 200_000
    back = read_model(tmp_path / "model.pt2")
    assert back.state_dict["head.weight"] is back.state_dict["table.weight"]
    assert torch.equal(back.constants["frequencies"], model().frequencies)
    made = tpcompiler.parallelize(back, 2, PLAN)
    with pytest.raises(ProgramError, match=r"cannot be run: \d+ of its weights have no values, such as 'head.weight'"):
        made.verify(ARGS)
    with pytest.raises(ProgramError, match="cannot be written in self-contained files"):
        made.save(tmp_path / "out", layout="ranks")
    made.save(tmp_path / "out")
    report = tpcompiler.open(tmp_path / "out").check()
    assert report.ok
    assert report.counts["tensors without values"] == 7
    assert "tensors" not in report.counts
    with pytest.raises(ArtifactError, match=r"has no weights of rank 0: .*\n  help: cut them: tpcompiler cut .*out"):
        read_rank(open_program(tmp_path / "out"), 0)
    with pytest.raises(ArtifactError, match="has no weights of rank 0"):
        tpcompiler.open(tmp_path / "out").verify(ARGS, original=back)
    zeros = read_model(tmp_path / "out" / "model.pt2")
    with pytest.raises(ProgramError, match="have no values"):
        tpcompiler.parallelize(zeros, 1, {}).verify(ARGS)


def bf16(model: nn.Module) -> nn.Module:
    return model.to(torch.bfloat16)


CONVERSIONS: dict[str, tuple[Callable[[nn.Module], object], torch.dtype]] = {
    "to": (bf16, torch.bfloat16),
    "half": (lambda model: model.half(), torch.float16),
    "to(dtype=)": (lambda model: model.to(dtype=torch.float64), torch.float64),
    "twice": (lambda model: bf16(model.double()).train(), torch.bfloat16),
    "load_state_dict": (lambda model: model.load_state_dict(Model().state_dict()), torch.float32),
    "assign": (lambda hollow: hollow.load_state_dict(model().state_dict(), assign=True), torch.float32),
}


CUT = some(CONVERSIONS, 5)  # the others are read by the same code


# Weights that are assigned after the block have values.
INSIDE = [(how, inside) for how in CONVERSIONS for inside in (True, False) if inside or how != "assign"]


@cache
def converted_model(how: str, inside: bool) -> tuple[Model, ExportedProgram]:
    """Convert a model without weights, in the block or after it, and export it."""
    convert, _ = CONVERSIONS[how]
    with tpcompiler.weightless():
        made = Model()
        if inside:
            convert(made)
    if not inside:
        convert(made)
    with tpcompiler.weightless():
        return made, export(made.eval(), ARGS, dynamic_shapes=SIZES)


def described(program: ExportedProgram) -> list[str]:
    """The graph and the types of all tensors, of which those without values have nothing else."""
    return [str(program.graph), *(f"{name}: {value.dtype} {value.shape}" for name, value in program.state_dict.items())]


@pytest.mark.slow
@pytest.mark.parametrize(("how", "inside"), INSIDE)
def test_a_model_without_weights_is_converted(how: str, inside: bool, tmp_path: Path) -> None:
    """In the block or after it; tied weights stay tied, and buffers keep their values."""
    _, dtype = CONVERSIONS[how]
    made, program = converted_model(how, inside)
    assert {value.dtype for value in made.parameters()} == {dtype}
    assert (made.head.weight is made.table.weight) == (how != "assign")  # which unties any model
    assert weightless_names(program) == set(program.state_dict)
    assert torch.equal(program.constants["frequencies"], model().frequencies.to(made.frequencies.dtype))
    if not inside:  # the same program, which is cut and verified once
        assert described(program) == described(converted_model(how, True)[1])
    if not inside or how not in CUT:
        return
    real = copy.deepcopy(model()).to(dtype)
    held = real.named_parameters(remove_duplicate=how != "assign")
    save_file({name: value.detach().clone() for name, value in held}, tmp_path / "model.safetensors")
    tpcompiler.parallelize(program, 3, PLAN).save(tmp_path / "out")
    tpcompiler.open(tmp_path / "out").cut(tmp_path / "model.safetensors")
    real.register_buffer("frequencies", program.constants["frequencies"], persistent=False)
    assert tpcompiler.open(tmp_path / "out").verify(ARGS, original=export(real, ARGS, dynamic_shapes=SIZES)).ok


@pytest.mark.slow
def test_the_ranks_of_one_machine(tmp_path: Path) -> None:
    out, checkpoint = converted(tmp_path / "out"), write_checkpoint(tmp_path / "c")
    tpcompiler.open(out).cut(checkpoint, [1, 2])
    assert set(weights(out)) == {"rank_1.safetensors", "rank_2.safetensors"}
    with pytest.raises(ArtifactError, match="has the weights of rank 1 already"):
        tpcompiler.open(out).cut(checkpoint, [0, 1])
    with pytest.raises(ArtifactError, match="rank 3 is outside the artifact's world of 3"):
        tpcompiler.open(out).cut(checkpoint, [3])
    assert tpcompiler.open(out).check().counts["tensors without values"]
    tpcompiler.open(out).cut(checkpoint, [0])
    converted(tmp_path / "whole", has_weights=True)
    assert weights(out) == weights(tmp_path / "whole")


class Stop(Exception):
    pass


def cut_until(out: Path, checkpoint: Path, part: float, **asked: Any) -> None:
    def stop(done: int, total: int) -> None:
        if done >= total * part:
            raise Stop

    with pytest.raises(Stop):
        tpcompiler.open(out).cut(checkpoint, progress=stop, **asked)


@pytest.mark.slow
@pytest.mark.parametrize("part", [0, 0.7])
def test_an_interrupted_cut_goes_on(part: float, tmp_path: Path) -> None:
    out, checkpoint = converted(tmp_path / "out"), write_checkpoint(tmp_path / "c")
    cut_until(out, checkpoint, part)
    assert not weights(out)
    assert (out / ".cut.json").is_file()
    with (out / ".rank_1.safetensors.part").open("r+b") as file:
        file.truncate(max(0, file.seek(0, 2) - 3))  # in the middle of a tensor, or of the header
    seen: list[tuple[int, int]] = []
    tpcompiler.open(out).cut(checkpoint, progress=lambda done, total: seen.append((done, total)))
    assert seen[0][0] >= part * seen[0][1] * 0.9 - 1000  # what was written is not cut again
    assert seen[-1][0] == seen[-1][1]
    converted(tmp_path / "whole", has_weights=True)
    assert weights(out) == weights(tmp_path / "whole")
    assert read_manifest(out).files.keys() >= set(weights(out))
    assert tpcompiler.open(out).check(exported()).ok


def test_an_interrupted_cut_of_something_else_is_refused(tmp_path: Path) -> None:
    out, checkpoint = converted(tmp_path / "out"), write_checkpoint(tmp_path / "c")
    cut_until(out, checkpoint, 0.5)
    with pytest.raises(
        ArtifactError, match=r"an interrupted cut of other ranks.*\n  help: start again with force=True"
    ):
        tpcompiler.open(out).cut(checkpoint, [0])
    write_checkpoint(checkpoint, **{"table.weight": torch.ones(21, 8)})
    with pytest.raises(ArtifactError, match="or the checkpoint was changed since"):
        tpcompiler.open(out).cut(checkpoint)
    tpcompiler.open(out).cut(checkpoint, force=True)
    assert load_file(out / weights_file(0))["table.weight"].eq(1).all()


def rewrite(checkpoint: Path, **changed: torch.Tensor) -> None:
    """Other content of the same size and time."""
    times = {path: path.stat().st_mtime_ns for path in checkpoint.iterdir()}
    write_checkpoint(checkpoint, **changed)
    for path, time in times.items():
        os.utime(path, ns=(time, time))


@pytest.mark.parametrize("clock", ["as it is", "stands still"])
def test_an_interrupted_cut_compares_content(clock: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written already must be the checkpoint's; with the times of its files, and without."""
    out, checkpoint = converted(tmp_path / "out"), write_checkpoint(tmp_path / "c")
    if clock == "stands still":
        monkeypatch.setattr(Checkpoint, "fingerprint", lambda source: {})
    cut_until(out, checkpoint, 0.9)
    before = everything(out)
    rewrite(checkpoint, **{"table.weight": model().table.weight.detach() + 1})
    with pytest.raises(ArtifactError, match="or the checkpoint was changed since"):
        tpcompiler.open(out).cut(checkpoint)
    assert everything(out) == before
    rewrite(checkpoint)
    if clock == "stands still":  # and goes on with the same content
        tpcompiler.open(out).cut(checkpoint)
        assert tpcompiler.open(out).check(exported()).ok


def test_a_damaged_part_is_not_kept(tmp_path: Path) -> None:
    """Such as a power cut leaves."""
    out, checkpoint = converted(tmp_path / "out"), write_checkpoint(tmp_path / "c")
    cut_until(out, checkpoint, 0.9)
    with (out / ".rank_1.safetensors.part").open("r+b") as file:
        file.seek(file.seek(0, 2) // 2)
        file.write(bytes(64))
    with pytest.raises(ArtifactError, match=r"was changed since\n  help: start again with force=True"):
        tpcompiler.open(out).cut(checkpoint)


def test_a_checkpoint_that_changes_while_it_is_cut(tmp_path: Path) -> None:
    out, checkpoint = converted(tmp_path / "out"), write_checkpoint(tmp_path / "c")

    def change(done: int, total: int) -> None:
        if 2 * done > total:
            rewrite(checkpoint)

    with pytest.raises(ArtifactError, match="was changed while it was cut"):
        tpcompiler.open(out).cut(checkpoint, progress=change)
    assert not weights(out)


def test_an_artifact_with_weights_needs_none(tmp_path: Path) -> None:
    out = converted(tmp_path / "out", has_weights=True)
    with pytest.raises(ArtifactError, match="has its weights"):
        tpcompiler.open(out).cut(write_checkpoint(tmp_path / "c"))


def test_a_damaged_mark_is_refused(tmp_path: Path) -> None:
    import zipfile

    tpcompiler.save_weightless(hollow(), tmp_path / "model.pt2")
    for mark, said in (("[]", "is damaged"), (json.dumps({"frequencies": "x", "no": "no"}), "has no such tensor")):
        with zipfile.ZipFile(tmp_path / "model.pt2") as old, zipfile.ZipFile(tmp_path / "new.pt2", "w") as new:
            for name in old.namelist():
                new.writestr(name, mark if name.endswith("weightless.json") else old.read(name))
        with pytest.raises(ArtifactError, match=said):
            read_model(tmp_path / "new.pt2")


@pytest.mark.slow
def test_ranks_read_their_shares_from_the_checkpoint(tmp_path: Path) -> None:
    """In real processes; nothing is written."""
    out, checkpoint = converted(tmp_path / "out", 2), write_checkpoint(tmp_path / "c")
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    torch.save(ARGS, tmp_path / "args")
    run_ranks(2, Path(__file__).parent / "load_worker.py", tmp_path)
    with torch.no_grad():
        want = model()(*ARGS)
    for rank in range(2):
        got = torch.load(tmp_path / f"{rank}.result")
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5 * float(want.abs().max()))
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == before
    shutil.rmtree(checkpoint)
