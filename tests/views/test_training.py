"""Pictures of a program with gradients: its backward stands apart from its forward."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

import tpcompiler
from tests.views.artifacts import LAYERS, Mlp, randomised
from tests.views.opened import artifact_dot, artifact_text


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mlp() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("training") / "out"
    program = tpcompiler.export_training(randomised(Net()), (torch.randn(4, 8),))
    tpcompiler.parallelize(program, 2, LAYERS).save(path)
    return path


def test_the_table(out: Path) -> None:
    """The layers of the backward run from the last to the first, whose inputs need no gradient."""
    text = artifact_text(out)
    assert_expected_inline(
        text.partition("\n\n")[2].partition("R             output")[0],
        """\
R             input  x  f32[4, 8]
              layers.* x 4  each: 1 all_reduce; 128 B on the wire
S(1)            up  addmm  f32[4, 8]  bias S(0) f32[16], weight S(0) f32[16, 8]
S(1)            relu  f32[4, 8]
P(sum)          down  addmm  f32[4, 8]  bias R f32[8], weight S(1) f32[8, 16]
P(sum) -> R     down  all_reduce  f32[4, 8]  128 B over tp, 128 B on the wire
R               add  f32[4, 8]
R             pow, mean  f32[]
              backward
R               5 small ops (full, div, pow, mul)  f32[4, 8]
                layers.3-1 x 3  each: 1 all_reduce; 128 B on the wire
S(1)              down  mm  f32[4, 8]  weight S(1) f32[8, 16]
S(1)              down  mm  f32[8, 8]
R                 down  sum  f32[1, 8]
S(1)              threshold_backward  f32[4, 8]
P(sum)            up  mm  f32[4, 8]  weight S(0) f32[16, 8]
P(sum) -> R       up  all_reduce  f32[4, 8]  128 B over tp, 128 B on the wire
S(0)              up  mm  f32[8, 8]
S(1)              up  sum  f32[1, 8]
R                 add  f32[4, 8]
                layers.0
S(1)              down  mm  f32[4, 8]  weight S(1) f32[8, 16]
S(1)              down  mm  f32[8, 8]
R                 down  sum  f32[1, 8]
S(1)              threshold_backward  f32[4, 8]
S(0)              up  mm  f32[8, 8]
S(1)              up  sum  f32[1, 8]
""",
    )


def test_frames(out: Path) -> None:
    frames = re.findall(r"label=.*?<B>(.*?)</B>.*> labeljust", artifact_dot(out).source)
    assert frames == ["layers.* x 4", "backward", "layers.3-1 x 3", "layers.0"]


@pytest.mark.slow
def test_a_program_without_gradients_has_no_backward(tmp_path: Path) -> None:
    """Negative control."""
    program = torch.export.export(randomised(Net()), (torch.randn(4, 8),))
    tpcompiler.parallelize(program, 2, LAYERS).save(tmp_path / "out")
    assert "backward" not in artifact_text(tmp_path / "out")
