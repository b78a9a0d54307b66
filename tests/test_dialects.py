"""The three forms in which torch exports a program, fresh and from a file: equal numbers, equal collectives."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim, ExportedProgram

import tpcompiler
from tests.passes.models import Tied
from tests.zoo.case import randomise
from tests.zoo.decoders import LLAMA

Dialect = Callable[[ExportedProgram], ExportedProgram]

DIALECTS: dict[str, Dialect] = {
    "training": lambda program: program,
    "canonical": lambda program: program.run_decompositions({}),
    "core": lambda program: program.run_decompositions(),
}


class Block(nn.Module):
    """Attention and an MLP with biases, layer norms before them."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(16), nn.LayerNorm(16)
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        y = self.before(x)
        q, k, v = (part(y).view(b, s, 4, 4).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(b, s, 16))
        return x + self.down(F.gelu(self.up(self.between(x))))


class ByHand(Block):
    """The same with the softmax written out."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        q, k, v = (part(x).view(b, s, 4, 4).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = torch.softmax(q @ k.transpose(-1, -2) / 2, -1) @ v
        return self.down(F.gelu(self.up(self.o(mixed.transpose(1, 2).reshape(b, s, 16)))))


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 6, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.norm(self.a(x))))


class InTraining(nn.Module):
    """Statistics, a counter and a running mean written back; values changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        h = self.norm(self.up(x)).relu_().mul_(2)
        y = self.down(h)
        self.mean.lerp_(y.mean(0), 0.1)
        y[0].zero_()
        return y * self.calls


BATCH, STEPS = Dim("batch"), Dim("steps")
HEADS = {"q": "colwise", "k": "colwise", "v": "colwise", "o": "rowwise", "up": "colwise", "down": "rowwise"}


def tokens(batch: int, steps: int) -> torch.Tensor:
    return torch.randn(batch, steps, 16)


# model, its input for a batch and a length, dynamic dims, plan, kinds of collectives
MODELS: dict[
    str, tuple[Callable[[], nn.Module], Callable[[int, int], torch.Tensor], Any, dict[str, str], list[str]]
] = {
    "attention": (Block, tokens, {0: BATCH, 1: STEPS}, HEADS, ["all_reduce"] * 2),
    "attention by hand": (ByHand, tokens, {0: BATCH, 1: STEPS}, HEADS, ["all_reduce"] * 2),
    "convolutions": (
        ConvNet,
        lambda batch, _: torch.randn(batch, 3, 6, 6),
        {0: BATCH},
        {"a": "colwise", "b": "rowwise"},
        ["all_reduce"],
    ),
    "in training": (
        InTraining,
        lambda batch, _: torch.randn(batch, 8),
        {0: BATCH},
        {"up": "colwise", "down": "rowwise"},
        ["all_reduce"],
    ),
    "tied vocabulary": (
        lambda: Tied(20),
        lambda batch, steps: torch.randint(0, 20, (batch, steps)),
        {0: BATCH, 1: STEPS},
        {"embed": "embedding_rowwise"},
        ["all_reduce", "all_gather"],
    ),
}


def model(name: str) -> nn.Module:
    return randomise(MODELS[name][0]()).train(name == "in training")


def from_file(program: ExportedProgram) -> ExportedProgram:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


@pytest.mark.slow
@pytest.mark.sweep(7)
@pytest.mark.parametrize(("dynamic", "dialect", "name"), list(itertools.product((False, True), DIALECTS, MODELS)))
def test_equal_numbers_and_collectives(name: str, dialect: str, dynamic: bool) -> None:
    _, make, dims, plan, kinds = MODELS[name]
    exported = torch.export.export(model(name), (make(3, 5),), dynamic_shapes=(dims,) if dynamic else None)
    fresh = DIALECTS[dialect](exported)
    for program, world in ((fresh, 2), (fresh, 4), (from_file(fresh), 4)):
        made = tpcompiler.parallelize(program, world, plan)
        assert [c.kind for c in made.collectives()] == kinds
        assert all(c.why != "fallback" for c in made.collectives())
        assert made.verify((make(4, 7) if dynamic else make(3, 5),)).ok


def wire_bytes(made: tpcompiler.ParallelProgram, why: str) -> list[int]:
    return [c.wire_bytes for c in made.collectives() if c.why == why]


@pytest.mark.sweep(10)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_llama(dialect: str, dynamic: bool) -> None:
    """Core ATen costs no byte more than the training IR."""
    program = DIALECTS[dialect](LLAMA.export(dynamic))
    made = tpcompiler.parallelize(program, 2, LLAMA.plan)
    assert len(made.collectives()) == 6
    assert sum(c.wire_bytes for c in made.collectives()) == 36480
    assert wire_bytes(made, "fallback") == []
    assert made.verify((), LLAMA.inputs(2, 12)).ok


@pytest.mark.slow
def test_core_aten_costs_no_more_where_dims_are_merged() -> None:
    """Its matrices have two dims: a cut of the steps lies inside the merged dim, in blocks of a batch row each."""
    network = randomise(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)))
    x = torch.randn(3, 4, 8)
    program = torch.export.export(network, (x,))
    for dialect in DIALECTS.values():
        made = tpcompiler.parallelize(dialect(program), 2, {}, inputs=["S(1)"], outputs=["S(1)"])
        assert made.collectives() == []
        assert made.verify((x,)).ok
