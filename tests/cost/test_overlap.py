"""A collective costs what sticks out of the work that a rank does meanwhile."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tpcompiler
from tpcompiler.cost.machine import Link, Machine

FLOPS, MEMORY_BANDWIDTH, FLOOR = 1e13, 1e12, 3e-6


class Beside(nn.Module):
    """Two layers, whose sum the ranks reduce, and a product that does not need it, or needs it."""

    def __init__(self, apart: bool) -> None:
        super().__init__()
        self.up, self.down, self.side = (nn.Linear(64, 64, bias=False) for _ in range(3))
        self.apart = apart

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(torch.relu(self.up(x)))
        return y + self.side(x) if self.apart else self.side(y)


@pytest.mark.parametrize(("apart", "bandwidth"), [(True, 8e9), (True, 1e8), (False, 8e9)])
def test_a_product_hides_a_collective_that_it_does_not_need(apart: bool, bandwidth: float) -> None:
    """As far as it lasts; the rest, and all that the product waits for, adds to the call."""
    program = torch.export.export(Beside(apart), (torch.zeros(8, 64),))
    made = tpcompiler.parallelize(program, 2, {"up": "colwise", "down": "rowwise", "side": "replicate"})
    links = {("", 0): [Link(0.0, bandwidth)]}
    times = made.converted.predict(Machine(FLOPS, MEMORY_BANDWIDTH, 8e10, links, product=FLOOR, other=FLOOR))
    (sent,) = (step.sent for step in times.steps if step.sent)
    (hiding,) = (step.compute for step in times.steps if step.module == "side")
    assert sent == pytest.approx(8 * 64 * 4 / bandwidth)
    assert times.total.network == pytest.approx(max(0.0, sent - hiding) if apart else sent)
    assert (sent < hiding) == (bandwidth > 1e8)
