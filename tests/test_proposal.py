"""Plans that `inspect` proposes: layers in pairs, and nothing cut that something else needs whole."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.export import export

import tpcompiler
from passes.canonicalize import canonicalize
from tests.zoo.index import CASES
from tpcompiler.cli.describe import plan_skeleton
from tpcompiler.proposal import propose_styles

X = torch.randn(2, 6, 8)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(torch.relu(self.gate(x)) * self.up(x))
        return result


class Normed(Mlp):
    """A norm over the features that would be cut."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(torch.layer_norm(self.up(x), (12,)) + self.gate(x))
        return result


class Returned(Mlp):
    """What would be cut is an output too."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        h = self.up(x)
        return h, self.down(torch.relu(h + self.gate(x)))


class Chain(nn.Module):
    """Layers in a row go in pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(torch.relu(self.norm(self.first(x))))
        return result


@pytest.mark.parametrize(
    ("model", "x", "expected"),
    [
        (Mlp(), X, {"gate": "colwise", "up": "colwise", "down": "rowwise"}),
        (Normed(), X, {"gate": "colwise", "down": "rowwise"}),
        (Returned(), X, {"gate": "colwise", "down": "rowwise"}),
        (Chain(), X, {f"layers.{at}": "rowwise" if at % 2 else "colwise" for at in range(4)}),
        (Images().eval(), torch.randn(1, 3, 6, 6), {"first": "colwise", "last": "rowwise"}),
        (nn.Linear(8, 8), X, {}),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_pairs(model: nn.Module, x: torch.Tensor, expected: dict[str, str]) -> None:
    exported = export(model, (x,))
    assert propose_styles(canonicalize(exported)) == expected
    program = tpcompiler.parallelize(exported, 2, expected)
    assert program.verify((x,)).ok
    assert {c.kind for c in program.collectives()} <= {"all_reduce", "all_gather"}
    assert bool(expected) == bool(program.collectives())


@pytest.mark.sweep(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "t5", "minilm"])
def test_what_a_person_would_write(name: str) -> None:
    """Of a transformer's layers: two all_reduce each, and no other collective."""
    case = CASES[name]
    exported = case.export(False)
    text = plan_skeleton(exported)
    own = {pattern: style for pattern, style in case.asked().items() if style in ("colwise", "rowwise")}
    program = tpcompiler.parallelize(exported, 2, tpcompiler.Plan.of(_read(text)))
    assert own
    assert {c.kind for c in program.collectives()} == {"all_reduce"}
    assert all(c.why != "fallback" for c in program.collectives())
    inside = [c for c in program.collectives() if "layer" in c.module or "block" in c.module]
    assert len(inside) == sum(layers.count * sum(layers.each.values()) for layers in case.layers)


def _read(text: str) -> dict[str, object]:
    import yaml

    found: dict[str, object] = yaml.safe_load(text)
    return found
