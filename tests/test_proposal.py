"""Plans that `inspect` proposes: those that the search finds, in a form that `convert` takes."""

from __future__ import annotations

import pytest
import torch
import yaml
from torch import nn
from torch.export import export

import tpcompiler
from tests.machines import SMALL
from tpcompiler.cli.describe import plan_text

MACHINE = SMALL

X = torch.randn(2, 6, 64)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.scale = nn.Linear(64, 256), nn.Linear(256, 64), nn.Parameter(torch.randn(64, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(torch.relu(self.up(x))) * self.scale[0]
        return result


class Outer(Mlp):
    """A module with two weights, which are placed one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = nn.Module()
        self.pair.a = nn.Parameter(torch.randn(256, 64))
        self.pair.b = nn.Parameter(torch.randn(64, 256))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = super().forward(x)
        return torch.relu(y @ self.pair.a.T) @ self.pair.b.T


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Mlp(), {"up": "colwise", "down": "rowwise", "**": "auto"}),
        (Outer(), {"up": "colwise", "down": "rowwise", "pair.a": "S(0)", "pair.b": "S(1)", "**": "auto"}),
    ],
    ids=["layers", "weights"],
)
def test_what_the_search_finds(model: nn.Module, expected: dict[str, str]) -> None:
    exported = export(model, (X,))
    plan = yaml.safe_load(plan_text(exported, tpcompiler.find_plan(exported, 2)))
    assert plan == expected
    program = tpcompiler.parallelize(exported, 2, plan)
    assert program.verify((X,)).ok
    assert {c.kind for c in program.collectives()} == {"all_reduce"}
