"""Persistent buffers, such as the bias of a router or running statistics, are the checkpoint's where it has them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.export import ExportedProgram, export

import tpcompiler
from tests.runtime.commands import refused

MACHINE = "ideal"  # as if latencies were none: small models are worth cutting

X = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
PLAN = {"up": "colwise", "down": "rowwise"}


class Normed(nn.Module):
    """Running statistics, a bias that training moves, and a counter that no checkpoint has."""

    offset: torch.Tensor
    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.norm = nn.BatchNorm1d(12)
        self.register_buffer("offset", torch.zeros(12))
        self.register_buffer("count", torch.full((1,), 3.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.down(torch.relu(self.norm(self.up(x)) + self.offset)) * self.count
        return made


def trained() -> nn.Module:
    torch.manual_seed(0)
    made = Normed().eval()
    made.norm.running_mean, made.norm.running_var, made.offset = torch.randn(12), torch.rand(12) + 0.5, torch.randn(12)
    return made


def hollow() -> ExportedProgram:
    with tpcompiler.weightless():
        return export(Normed().eval(), (X,))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "checkpoint").mkdir()
    save_file(dict(trained().state_dict()), tmp_path / "checkpoint" / "model.safetensors")
    return tmp_path / "checkpoint"


@pytest.mark.slow
def test_the_checkpoint_has_other_values(checkpoint: Path, tmp_path: Path) -> None:
    """Those of the constructor would give other numbers, without a word."""
    tpcompiler.parallelize(hollow(), 2, PLAN).save(tmp_path / "out")
    tpcompiler.open(tmp_path / "out").cut(checkpoint)
    whole = export(trained(), (X,))
    assert tpcompiler.open(tmp_path / "out").verify((X,), original=whole).ok
    assert tpcompiler.open(tmp_path / "out").check(whole).ok
    assert tpcompiler.open(tmp_path / "out").check(checkpoint=checkpoint).ok
    held = [load_file(tmp_path / "out" / f"rank_{rank}.safetensors") for rank in range(2)]
    assert torch.equal(torch.cat([each["offset"] for each in held]), trained().state_dict()["offset"])
    assert all(torch.equal(each["count"], torch.tensor([3.0])) for each in held)  # the program's own


@pytest.mark.slow
@pytest.mark.parametrize("partial", [False, True])
def test_a_checkpoint_that_lacks_one_is_refused(partial: bool, checkpoint: Path, tmp_path: Path) -> None:
    """As by torch's load_state_dict: zeros of the constructor are not the trained model's numbers."""
    program = hollow()
    tpcompiler.parallelize(program, 2, PLAN).save(tmp_path / "out")
    state = load_file(checkpoint / "model.safetensors")
    save_file({name: state[name] for name in state.keys() - {"offset"}}, checkpoint / "model.safetensors")
    with pytest.raises(tpcompiler.ArtifactError, match=r"does not fit the program: it has no 'offset'\n") as error:
        tpcompiler.open(tmp_path / "out").cut(checkpoint, partial=partial)
    assert error.value.help == (
        "give the checkpoint of the same model, or export it with persistent=False for a buffer that keeps the "
        "constructor's value"
    )
    assert not list((tmp_path / "out").glob("rank_*"))
    tpcompiler.save_weightless(program, tmp_path / "model.pt2")
    words = "--tp", 2, "--plan", "auto", "-o", tmp_path / "two", "--checkpoint", checkpoint
    assert "it has no 'offset'" in refused("convert", tmp_path / "model.pt2", *words)
    assert not (tmp_path / "two").exists()


def test_another_model_is_not_equal(checkpoint: Path, tmp_path: Path) -> None:
    """Negative control: the buffers matter."""
    tpcompiler.parallelize(hollow(), 2, PLAN).save(tmp_path / "out")
    tpcompiler.open(tmp_path / "out").cut(checkpoint)
    other = trained()
    other.offset.zero_()
    assert not tpcompiler.open(tmp_path / "out").verify((X,), original=export(other, (X,))).ok
