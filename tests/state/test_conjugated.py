"""Buffers of which torch holds other numbers in memory than it reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.export import export

import tpcompiler

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Conjugated(nn.Module):
    """Buffers that are conjugated and negated when they are read, and not in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("c", torch.randn(8, 6, dtype=torch.complex64).t().conj())
        self.register_buffer("n", torch.randn(8, dtype=torch.complex64).conj().imag)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.c @ (x * self.n).to(torch.complex64).t()).real


@pytest.mark.parametrize("plan", [{}, {"c": "S(1)", "n": "S(0)"}])
def test_buffers_that_are_conjugated_when_they_are_read(plan: dict[str, str], tmp_path: Path) -> None:
    torch.manual_seed(0)
    exported = export(Conjugated(), (X,))
    program = tpcompiler.parallelize(exported, 2, plan)
    assert program.verify((X,)).ok
    program.save(tmp_path / "out")
    assert tpcompiler.api.verify_artifact(tmp_path / "out", exported, (X,)).ok
