"""Buffers of which torch holds other numbers in memory than it reads."""

from __future__ import annotations

from collections.abc import Callable
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


@pytest.mark.sample(1)
@pytest.mark.parametrize("plan", [{}, {"c": "S(1)", "n": "S(0)"}])
def test_buffers_that_are_conjugated_when_they_are_read(plan: dict[str, str], tmp_path: Path) -> None:
    torch.manual_seed(0)
    exported = export(Conjugated(), (X,))
    program = tpcompiler.parallelize(exported, 2, plan)
    assert program.verify((X,)).ok
    program.save(tmp_path / "out")
    assert tpcompiler.open(tmp_path / "out").verify((X,), original=exported).ok


class Forms(nn.Module):
    """What is conjugated twice, or negated and conjugated, says of itself the same as what is not, but for a bit."""

    def __init__(self, made: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.up, self.made = nn.Linear(8, 12), made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.made(torch.view_as_complex(self.up(x).view(4, 6, 2)))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "made",
    [
        lambda c: c.conj().imag,
        lambda c: c.conj().real,
        lambda c: torch.view_as_real(c.conj().conj()),
        lambda c: c.mH.imag,
        lambda c: (c.conj() * c).imag,
    ],
    ids=["imag", "real", "twice", "mH", "product"],
)
def test_views_that_conjugate(made: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path) -> None:
    torch.manual_seed(0)
    exported = export(Forms(made), (X,))
    program = tpcompiler.parallelize(exported, 2, {"up": "colwise"})
    assert program.verify((X,)).ok
    program.save(tmp_path / "out")
