"""Reshard, merge, verify and check of what is not a plain model: ties, computed buffers, empty, expanded, several."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.export import ExportedProgram, export

import tpcompiler
import tpcompiler.checkpoint.cut
from tests.runtime.commands import refused, right
from tests.zoo.elastic import bits
from tpcompiler.runtime.artifact import read_manifest

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
PLAN = {"up": "colwise", "down": "rowwise"}


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> Any:
        return self.down(self.up(x).relu())


class Odd(nn.Module):
    """An empty buffer, one that is one row eight times, and one that is in the state dict under its second name."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 12)
        self.register_buffer("empty", torch.empty(0, 12))
        self.register_buffer("wide", torch.randn(1, 12).expand(8, 12))
        tied = torch.randn(12)
        self.register_buffer("first", tied, persistent=False)
        self.register_buffer("second", tied)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.empty, self.up(x) * self.first + x @ self.wide + self.second])


@dataclass
class Out:
    y: torch.Tensor


torch.export.register_dataclass(Out, serialized_type_name="tests.checkpoint.Out")


@pytest.fixture(scope="module")
def mlp() -> ExportedProgram:
    torch.manual_seed(0)
    return export(Mlp(), (X,))


def hollow(model: type[nn.Module]) -> ExportedProgram:
    with tpcompiler.weightless():
        return export(model(), (X,))


def checkpoint(program: ExportedProgram, path: Path, **other: torch.Tensor) -> Path:
    save_file({**{name: value.detach() for name, value in program.state_dict.items()}, **other}, path)
    return path


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", ["ranks", "shared"])
def test_empty_expanded_and_tied_to_what_is_not_persistent(layout: Any, tmp_path: Path) -> None:
    program = export(Odd(), (X,))
    tpcompiler.parallelize(program, 2, {"up": "colwise"}).save(tmp_path / "out", layout=layout)
    tpcompiler.open(tmp_path / "out").reshard(3, tmp_path / "three")
    tpcompiler.open(tmp_path / "three").merge(tmp_path / "model.pt2")
    back = torch.export.load(tmp_path / "model.pt2")
    assert bits(back) == bits(program)
    assert torch.equal(back.module()(X), program.module()(X))
    tpcompiler.open(tmp_path / "three").merge(tmp_path / "w.safetensors", safetensors=True)
    assert load_file(tmp_path / "w.safetensors").keys() == program.state_dict.keys()


def test_a_pending_weight_is_compared_bit_for_bit(mlp: ExportedProgram, tmp_path: Path) -> None:
    """-0 is another bias than 0, though a sum with zeros makes 0 of both."""
    zero = checkpoint(mlp, tmp_path / "zero.safetensors", **{"down.bias": torch.zeros(8)})
    minus = checkpoint(mlp, tmp_path / "minus.safetensors", **{"down.bias": -torch.zeros(8)})
    tpcompiler.parallelize(hollow(Mlp), 2, PLAN).save(tmp_path / "out")
    tpcompiler.open(tmp_path / "out").cut(zero)
    assert tpcompiler.open(tmp_path / "out").check(checkpoint=zero).ok
    assert tpcompiler.open(tmp_path / "out").check(checkpoint=minus).findings == [
        "'down.bias': the ranks' shares do not make the original's tensor"
    ]


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", ["ranks", "shared"])
def test_of_several_programs_each_is_proved_and_put_together(layout: Any, mlp: ExportedProgram, tmp_path: Path) -> None:
    """The weights of the second lie in the files of the first."""
    tpcompiler.parallelize({"one": mlp, "two": mlp}, 2, PLAN).save(tmp_path / "out", layout=layout)
    for name in ("one", "two"):
        assert right("verify", tmp_path / "out" / name).startswith("equal")
    tpcompiler.open(tmp_path / "out" / "two").merge(tmp_path / "model.pt2")
    assert bits(torch.export.load(tmp_path / "model.pt2")) == bits(mlp)


class Killed(BaseException):
    pass


@pytest.mark.slow
def test_a_cut_that_ends_before_the_manifest_is_written_goes_on(
    mlp: ExportedProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint(mlp, tmp_path / "c.safetensors")
    tpcompiler.parallelize(hollow(Mlp), 2, PLAN).save(tmp_path / "out")

    def killed(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(tpcompiler.checkpoint.cut, "say_files", killed)
        with pytest.raises(Killed):
            tpcompiler.open(tmp_path / "out").cut(path)
    tpcompiler.open(tmp_path / "out").cut(path)
    assert tpcompiler.open(tmp_path / "out").check(mlp).ok


def test_a_cut_of_several_that_ends_after_the_first_goes_on(
    mlp: ExportedProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, program = checkpoint(mlp, tmp_path / "c.safetensors"), hollow(Mlp)
    tpcompiler.parallelize({"one": program, "two": program}, 2, PLAN).save(tmp_path / "out")
    run, begun = tpcompiler.checkpoint.cut._Work.run, []

    def second(self: Any) -> Any:
        begun.append(self)
        if len(begun) == 2:
            raise Killed
        return run(self)

    with monkeypatch.context() as patch:
        patch.setattr(tpcompiler.checkpoint.cut._Work, "run", second)
        with pytest.raises(Killed):
            tpcompiler.open(tmp_path / "out").cut(path)
    tpcompiler.open(tmp_path / "out").cut(path)
    assert tpcompiler.open(tmp_path / "out").check().ok
    assert "has the weights of rank 0 already" in refused("cut", tmp_path / "out", "--checkpoint", path)


@pytest.mark.slow
def test_nothing_is_written_into_what_it_is_made_from(mlp: ExportedProgram, tmp_path: Path) -> None:
    out = tmp_path / "out"
    tpcompiler.parallelize(mlp, 2, PLAN).save(out, layout="shared")
    assert "is inside" in refused("reshard", "--single-device", out, "--safetensors", "-o", out / "rank_0.safetensors")
    assert "is inside" in refused("reshard", out, "--tp", 3, "-o", out / "three")
    assert tpcompiler.open(out).check(mlp).ok
    tpcompiler.open(out).reshard(3, out, force=True)
    assert read_manifest(out).mesh == {"tp": 3}


def test_a_ranks_program_is_not_cut_again(mlp: ExportedProgram) -> None:
    made = tpcompiler.parallelize(mlp, 2, PLAN).rank_program(0)
    with pytest.raises(tpcompiler.ProgramError, match="is a collective: the program is one rank's already"):
        tpcompiler.parallelize(made, 2, PLAN)
