"""An op that writes to its operands without its schema saying so: torch's functional form loses what it writes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.export import export

import tpcompiler
from tpcompiler.judge.compare.simulate import simulate


class Normed(nn.Module):
    def __init__(self, dims: int) -> None:
        super().__init__()
        conv, norm = (nn.Conv1d, nn.InstanceNorm1d) if dims == 1 else (nn.Conv2d, nn.InstanceNorm2d)
        self.conv = conv(4, 8, 3)
        self.norm = norm(8, affine=dims == 1, track_running_stats=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.norm(self.conv(x))
        return result


@pytest.mark.sample(1)
@pytest.mark.parametrize("dialect", ["training", "canonical"])
@pytest.mark.parametrize("dims", [1, 2])
def test_running_statistics_of_instances(dims: int, dialect: str) -> None:
    """They are written as eager torch writes them, call after call."""
    model = Normed(dims).train()
    first, second = (torch.randn(3, 4, *[6] * dims) for _ in range(2))
    exported = export(copy.deepcopy(model), (first,))
    exported = exported if dialect == "training" else exported.run_decompositions({})
    program = tpcompiler.parallelize(exported, 2, {"conv": "colwise"})
    assert program.verify((first,), then=[((second,), {})]).ok

    ranks = [program.rank_program(rank) for rank in range(2)]
    after = simulate(ranks, [[first]] * 2)
    model(first)
    for name in ("norm.running_mean", "norm.running_var"):
        shares = [result.mutated[name] for result in after]
        whole = shares[0] if shares[0].shape == (8,) else torch.cat(shares)
        torch.testing.assert_close(whole, model.get_buffer(name))
