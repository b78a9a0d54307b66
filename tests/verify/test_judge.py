"""What the judge allows, and ranks that wait for each other; the damages that it notices are in test_compare.py."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.export import export

import tpcompiler
from tests.zoo.faults import without_collective
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.sharding import Sharding
from tpcompiler.judge.compare.judge import Layout, difference, ordinary_magnitude
from tpcompiler.parallel.program_subject import compared_calls, subject_of
from tpcompiler.runtime.artifact import SINGLE


class Centred(nn.Module):
    """What it returns is zero but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm(self.down(nn.functional.gelu(self.up(x))), (64,)).mean(-1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_an_output_that_is_zero_but_for_rounding(seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(4, 32)
    program = tpcompiler.parallelize(export(Centred(), (x,)), 2, {"up": "colwise", "down": "rowwise"})
    assert program.verify((x,)).ok


@pytest.mark.parametrize(
    ("noise", "off", "ok"),
    [
        (1e-8, 7e-8, True),  # as far off as eight orders of summation
        (1e-8, 2e-7, False),
        (1.0, 0.4, True),  # rounding has decided between two branches: what is allowed ends at half of the scale
        (1.0, 0.6, False),
    ],
)
def test_how_far_off_an_output_may_be(noise: float, off: float, ok: bool) -> None:
    exact = torch.zeros(4, dtype=torch.float64) if noise < 1 else torch.tensor([1.0, 0, 0, 0], dtype=torch.float64)
    want = (exact + torch.tensor([0, noise, 0, 0])).float()
    layout = Layout(Mesh((("tp", 2),)), {"y": Sharding.replicated(1)})
    found = difference("y", "y", want, exact, [want, want + off * torch.eye(4)[2]], layout, magnitude=1.0)
    assert found.ok == ok


class Balanced(nn.Module):
    """One number, the sum of many that nearly cancel: how well it is rounded is chance."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(self.up(x).relu())
        return (y * torch.cos(torch.arange(float(y.numel())) * 0.7).view_as(y)).mean()


@pytest.mark.slow
def test_one_number_that_is_rounded_well_by_chance() -> None:
    """Of 2,000 inputs these four are rounded so well that the ranks' sums seem to be wrong, by up to 5.8 times."""
    program = tpcompiler.parallelize(
        export(Balanced(), (torch.randn(64, 64),)), 2, {"up": "colwise", "down": "rowwise"}
    )
    subject = subject_of(program.only)
    damaged = replace(subject, programs=[without_collective(rank, "all_reduce") for rank in subject.programs])
    for seed in (120, 1133, 1387, 1911):
        call = [(SINGLE, (torch.randn(64, 64, generator=torch.Generator().manual_seed(seed)),), {})]
        assert compared_calls({SINGLE: subject}, call).ok, seed
        assert not compared_calls({SINGLE: damaged}, call).ok, seed


@pytest.mark.parametrize("masked", [-1e9, torch.finfo(torch.float32).min, -torch.inf])
def test_the_number_of_a_mask_is_no_magnitude_that_values_are_rounded_at(masked: float) -> None:
    """Otherwise an output beside a mask could be off by more than its scale where float32 and float64 differ."""
    mask = torch.zeros(4, 4).masked_fill(torch.eye(4) > 0, masked)
    assert ordinary_magnitude([mask, torch.full((3,), 1.6e9, dtype=torch.int64)]) == 0.0
    assert ordinary_magnitude([mask + 3, torch.tensor([1.6e9, 1.7e9])]) == float(torch.tensor(1.7e9))


@pytest.mark.slow
def test_float64_is_judged_by_another_order_of_summation() -> None:
    """128 terms that cancel: their sum is rounded by far more than 16 epsilons of it, and no wider type shows that."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 128, bias=False), nn.Linear(128, 64, bias=False)).double()
    with torch.no_grad():
        model[1].weight[:, 1::2] = -model[1].weight[:, ::2]
        model[0].weight[1::2] = model[0].weight[::2] * (1 + 1e-6)
        order = torch.randperm(128)
        model[1].weight[:], model[0].weight[:] = model[1].weight[:, order], model[0].weight[order]
    exported = export(model, (torch.randn(32, 8, dtype=torch.float64),))
    program = tpcompiler.parallelize(exported, 2, {"0": "colwise", "1": "rowwise"})
    report = program.verify()
    assert report.ok, report
    assert report.tolerance > 16 * torch.finfo(torch.float64).eps
    control = copy.deepcopy(model)
    with torch.no_grad():
        control[1].weight[0, 0] += 1e-6
    other = export(control, (torch.randn(32, 8, dtype=torch.float64),))
    assert not program.verify(other.example_inputs[0], original=other).ok  # type: ignore[index]
