"""A two-layer network with something of one's own before, between or after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import ExportedProgram

import tpcompiler
from tests.zoo.case import randomise
from tpcompiler.errors import TpCompilerError

PLAN = {"up": "colwise", "down": "rowwise"}
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))


class Net(nn.Module):
    """`up` and `down` are its layers, `both` runs them; `function(self, *inputs)` is its forward."""

    def __init__(self, function: Callable[..., Any] | None = None, hidden: int = 16, **parts: Any) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, hidden), nn.Linear(hidden, 8)
        self.function = function
        for name, part in parts.items():
            if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *x: Any) -> Any:
        return self.function(self, *x) if self.function is not None else self.both(*x)

    def both(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def exported(module: nn.Module, *inputs: Any, **options: Any) -> ExportedProgram:
    return torch.export.export(randomise(module), inputs, **options)


def refusal(program: ExportedProgram, plan: Any = PLAN, mesh: Any = 2, **boundary: Any) -> str:
    """The kind and the words of the error that parallelize raises."""
    with pytest.raises(TpCompilerError) as raised:
        tpcompiler.parallelize(program, mesh, plan, **boundary)
    return f"{type(raised.value).__name__}: {raised.value}"
