"""Small exported programs for the tests of the written form and of the command line."""

from __future__ import annotations

import torch
from torch import nn
from torch.export import Dim, ExportedProgram

PLAN = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
PLAN_TEXT = '"layers.*.up": colwise\n"layers.*.down": rowwise\n'


def randomised(module: nn.Module, seed: int = 0) -> nn.Module:
    """The module with every parameter drawn anew: biases too, so that one added twice is seen."""
    torch.manual_seed(seed)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return module.eval()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Mlp(nn.Module):
    """Two equal layers and a head; its outputs have names, and one of them is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> dict[str, torch.Tensor | None]:
        for layer in self.layers:
            x = layer(x)
        return {"hidden": x, "cache": None, "logits": self.head(x) + shift}


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 15, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x)


def mlp_inputs(seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(3, 8, generator=generator), "shift": torch.randn(4, generator=generator)}


def export_mlp(seed: int = 0) -> ExportedProgram:
    return torch.export.export(randomised(Mlp(), seed), tuple(mlp_inputs().values()))


def export_conv() -> ExportedProgram:
    return torch.export.export(randomised(Conv()), (torch.randn(2, 3, 8, 8),))


class Divided(nn.Module):
    """Has a branch for one number, which an export with another one excludes."""

    def forward(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return x if n == 1 else x / (n - 1)


def export_divided() -> ExportedProgram:
    return torch.export.export(Divided(), (torch.ones(3, 8), 4), dynamic_shapes={"x": None, "n": Dim.AUTO})
