"""Small models that between them have every layout: uneven and empty shards, channels_last, views, sharded outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim, ExportedProgram

import tpcompiler
from tests.zoo.case import randomise
from tests.zoo.decoders import LLAMA
from tpcompiler import ParallelProgram
from tpcompiler.runtime.inputs import flatten_inputs

Inputs = dict[str, torch.Tensor]


class Odd(nn.Module):
    """Sizes that nothing divides: on four ranks the hidden layer leaves one rank with nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(11, 6), nn.LayerNorm(6)
        self.up, self.down, self.head = nn.Linear(6, 5), nn.Linear(5, 6), nn.Linear(6, 15)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.embed(ids)
        x = x + self.down(torch.relu(self.up(self.norm(x))))
        return self.head(x).softmax(-1), x.mean(1)


class Conv(nn.Module):
    """Convolutions in channels_last, one of them with a weight that is cut on its input channels."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 12, 3, padding=1)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = torch.relu(self.a(x))
        y = self.b(h)
        return h, y, y.flatten(1), h.mean(1)


class Views(nn.Module):
    """Outputs that are views of what one collective made, and views of what is still cut."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = torch.relu(self.up(x))
        y = self.down(h)
        return y.permute(2, 0, 1), y.sum(-1, keepdim=True).expand(2, 3, 5), h.transpose(0, 1), h.permute(2, 0, 1) * 2


class Counting(nn.Module):
    """A cache of what it saw, cut by rows, and a count."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)
        self.up.bias.requires_grad_(False)
        self.register_buffer("seen", torch.zeros(3, 6))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.tensor([2.0, 3.0, 4.0, 5.0]), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.up(x * self.scale))
        self.seen.mul_(0.5).add_(h)
        self.calls.add_(1)
        return self.down(self.seen)


MLP = {"up": "colwise", "down": "rowwise"}
CACHE = {**MLP, "seen": "S(1)"}


@dataclass(frozen=True)
class Case:
    """A model, its inputs by name, a plan, and the outputs that stay cut."""

    model: type[nn.Module] | None
    inputs: Inputs
    plan: Mapping[str, str]
    outputs: list[str] | None = None
    dims: Any = field(default=None)


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


IDS = torch.arange(20).view(4, 5) % 11
IMAGE = _normal(2, 4, 5, 5)
ODD = {"embed": "embedding_rowwise", **MLP, "head": "colwise_gather_output"}
CONV = {"a": "colwise", "b": "rowwise"}
LAST = IMAGE.to(memory_format=torch.channels_last)

CASES = {
    "llama": Case(None, LLAMA.inputs(2, 12), LLAMA.plan),
    "llama_dynamic": Case(None, LLAMA.inputs(2, 12), LLAMA.plan, dims=LLAMA.dims),
    "odd": Case(Odd, {"ids": IDS}, ODD),
    "odd_dynamic": Case(Odd, {"ids": IDS}, ODD, dims={"ids": {0: Dim("batch")}}),
    "conv": Case(Conv, {"x": LAST}, CONV),
    "conv_gathered": Case(Conv, {"x": IMAGE}, dict.fromkeys(CONV, "colwise_gather_output")),
    "conv_cut": Case(Conv, {"x": LAST}, CONV, outputs=["S(1)", "R", "S(0)", "R"]),
    "conv_dynamic": Case(Conv, {"x": LAST}, dict.fromkeys(CONV, "colwise_gather_output"), dims={"x": {0: Dim("n")}}),
    "views": Case(Views, {"x": _normal(2, 3, 4)}, MLP),
    "views_cut": Case(Views, {"x": _normal(2, 3, 4)}, MLP, outputs=["S(0)", "R", "S(2)", "S(0)"]),
    "counting": Case(Counting, {"x": _normal(3, 4)}, CACHE),
}


NAMES = [pytest.param(name, marks=pytest.mark.slow) if "llama" in name else name for name in CASES]


@cache
def exported(name: str) -> ExportedProgram:
    case = CASES[name]
    model = randomise(LLAMA.build() if case.model is None else case.model())
    return torch.export.export(model, (), case.inputs, dynamic_shapes=case.dims)


@cache
def functional(name: str) -> ExportedProgram:
    """The export as the judge takes it: functional, so that it says which buffers are written."""
    return exported(name).run_decompositions({})


@cache
def converted(name: str, world: int) -> ParallelProgram:
    return tpcompiler.parallelize(exported(name), world, CASES[name].plan, outputs=CASES[name].outputs)


@cache
def ranks(name: str, world: int) -> list[ExportedProgram]:
    program = converted(name, world)
    return [program.rank_program(rank) for rank in range(world)]


def inputs_of(name: str, world: int) -> list[list[Any]]:
    """Every rank's flat inputs: whole, as in all these cases."""
    return [flatten_inputs(exported(name), (), CASES[name].inputs)] * world
