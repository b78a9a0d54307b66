"""Ops that torch evaluates on real values only: a program that calls them is written, read and checked as any other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.export import export

import tpcompiler

aten = torch.ops.aten
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
KINDS: dict[str, Callable[..., torch.Tensor]] = {
    "by one number": lambda h, scale, zero: torch.fake_quantize_per_tensor_affine(h, 0.1, 0, -128, 127),
    "by one tensor": lambda h, scale, zero: torch.fake_quantize_per_tensor_affine(h, scale[:1], zero[:1], -128, 127),
    "by features": lambda h, scale, zero: torch.fake_quantize_per_channel_affine(h, scale, zero, 1, -128, 127),
    "learnt": lambda h, scale, zero: aten._fake_quantize_learnable_per_tensor_affine(
        h, scale[:1], zero[:1].float(), -128, 127, 1.0
    ),
    "learnt by features": lambda h, scale, zero: aten._fake_quantize_learnable_per_channel_affine(
        h, scale, zero.float(), 1, -128, 127, 1.0
    ),
}


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("scale", torch.linspace(0.1, 0.2, 16))
        self.register_buffer("zero", torch.arange(16, dtype=torch.int32) - 8)
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(KINDS[self.kind](self.up(x), self.scale, self.zero))  # type: ignore[no-any-return]


@pytest.mark.sample(1)
@pytest.mark.sweep
@pytest.mark.parametrize("from_file", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_fake_quantised_values(kind: str, from_file: bool, tmp_path: Path) -> None:
    program = export(Net(kind), (X,))
    if from_file:
        torch.export.save(program, tmp_path / "model.pt2")
        program = torch.export.load(tmp_path / "model.pt2")
    made = tpcompiler.parallelize(program, 2, {"up": "colwise", "down": "rowwise"})
    made.save(tmp_path / "out")  # and checks the files
    assert tpcompiler.open(tmp_path / "out").verify((X,), original=program).ok
