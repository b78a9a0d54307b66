"""Rows of the table: programs with gradients, and gradients in scripts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.bad_input.row import Row, loaded
from tpcompiler import export_training, redistribute
from tpcompiler.errors import (
    ArtifactError,
    InputsError,
    LaunchError,
    PlanError,
    ProgramError,
    ShardingError,
    UnsupportedError,
)

X = torch.ones(5, 8)


class Losses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        made = self.up(x)
        return {"mean": made.mean(), "square": made.square().mean(), "made": made}


class Branches(Losses):
    def forward(self, x: torch.Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda y: self.up(y).mean(), lambda y: self.up(y).square().mean(), (x,))


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8)
        self.b.weight.data = self.a.weight.data

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x)).mean()  # type: ignore[no-any-return]


TRAINING = [
    Row(
        "a program without gradients is trained",
        lambda _: loaded("one", training=True),
        "the artifact's programs return no gradients, so they cannot be trained",
        "export the model and its loss by tpcompiler.export_training",
        code=ArtifactError,
    ),
    Row(
        "a package is trained",
        lambda _: loaded("one", training=True, compiled=True),
        "a package has no backward of its own to train with",
        "load it with compiled=False",
        code=UnsupportedError,
    ),
    Row(
        "an unknown way to recompute",
        lambda _: loaded("one", training=True, recompute="some"),
        "recompute is 'some'",
        "give one of min-cut, all, none",
        code=InputsError,
    ),
    Row(
        "several outputs could be the loss",
        lambda _: export_training(Losses(), (X,)),
        "2 of the outputs ['mean', 'square', 'made'] can be the loss",
        "name one by loss=, or pass a function",
        code=InputsError,
    ),
    Row(
        "a loss with dims",
        lambda _: export_training(Losses(), (X,), loss="made"),
        "none of the outputs ['mean', 'square', 'made'] is 'made', a float without dims",
        "name one by loss=, or pass a function",
        code=InputsError,
    ),
    Row(
        "a model that branches on data",
        lambda _: export_training(Branches(), (X,)),
        "'cond' (cond) is not supported in a program with gradients",
        "compute both branches and choose with torch.where, or call an op without checks or effects",
        "used at: rows_training.py:37, in forward",
        code=UnsupportedError,
    ),
    Row(
        "two parameters in one memory",
        lambda _: export_training(Shared(), (X,)),
        "'a.weight' and 'b.weight' are two parameters in one memory, each with its own gradient",
        "tie them (b.weight = a.weight), or give one a copy",
        code=ProgramError,
    ),
    Row(
        "an export for training in inference mode",
        lambda _: torch.inference_mode()(export_training)(Losses(), (X,), loss="mean"),
        "torch.inference_mode() is on, in which no tensor has a gradient",
        "call export_training outside of it; torch.no_grad() may be on",
        code=UnsupportedError,
    ),
    Row(
        "`redistribute` to no placement",
        lambda _: redistribute(X, 2, "R", "S(x)"),
        "'S(x)' is not a placement",
        "write R, S(dim) such as S(0) or S(-1), or P(op) with op one of sum, avg, product, max, min",
        "asked by: target=",
        code=PlanError,
    ),
    Row(
        "`redistribute` on a dim that there is not",
        lambda _: redistribute(X, 2, "R", "S(2)"),
        "cannot shard x on dim 2: it has 2 dims",
        "use a dim from -2 to 1",
        code=ShardingError,
    ),
    Row(
        "a gradient through a pending maximum",
        lambda _: redistribute(X.clone().requires_grad_(), 2, "P(max)", "R"),
        "no gradient passes through a pending max",
        "detach x, or let the ranks hold terms of a sum, P(sum)",
        code=UnsupportedError,
    ),
    Row(
        "`redistribute` not started by torchrun",
        lambda _: redistribute(X, 2, "R", "S(0)"),
        "this process is in no group: RANK and WORLD_SIZE are not set",
        "start it with torchrun --nproc-per-node 2",
        code=LaunchError,
    ),
]
