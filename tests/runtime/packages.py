"""A model whose ranks make every kind of collective, keep a count, write to what they are given, and are not all alike."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import nn
from torch.export import Dim, ExportedProgram, export

import tpcompiler
from tests.zoo.case import randomise

PLAN = {"table": "embedding_rowwise", "up": "colwise", "down": "rowwise", "head": "colwise_gather_output"}
IDS = torch.arange(9).remainder(5)
SUM = torch.ones(9)


class Every(nn.Module):
    """7 ids, cut unevenly by 3 ranks; rows in, columns through `head`, rows out."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 6)
        self.up, self.down, self.head = nn.Linear(6, 12), nn.Linear(12, 6), nn.Linear(6, 6)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, ids: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, int]:
        self.calls.add_(1)
        hidden = self.down(self.up(self.table(ids)).relu())
        total.add_(hidden.sum(-1))
        made = self.head(hidden) * self.calls
        return made, made.argmax(-1), None, 3


@cache
def exported() -> ExportedProgram:
    rows = Dim("rows", min=3, max=300)
    return export(randomise(Every()), (IDS, SUM), dynamic_shapes={"ids": {0: rows}, "total": {0: rows}})


def write(directory: Path, world: int = 3, layout: str = "shared") -> tpcompiler.ParallelProgram:
    made = tpcompiler.parallelize(exported(), world, PLAN)
    made.save(directory, layout=layout)  # type: ignore[arg-type]
    return made


class Same(nn.Module):
    def forward(self, xs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return tuple(x * 2 for x in xs)


# From one sharding to another: all_reduce, reduce_scatter, all_gather, all_to_all.
CHANGES = [("P(sum)", "R"), ("P(sum)", "S(0)"), ("S(0)", "R"), ("S(0)", "S(1)")]


def write_changes(directory: Path, world: int = 2) -> tpcompiler.ParallelProgram:
    values = [torch.arange(4.0 * world * world).reshape(2 * world, 2 * world) + at for at in range(len(CHANGES))]
    inputs, outputs = ([pair[end] for pair in CHANGES] for end in (0, 1))
    made = tpcompiler.parallelize(export(Same(), (values,)), world, {}, inputs=inputs, outputs=outputs)
    made.save(directory)
    return made


class Laid(nn.Module):
    """Takes columns where it was exported with rows; returns what it has written."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("held", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.held.add_(x.sum(0))  # type: ignore[operator]
        return x.relu() * 2, self.held  # type: ignore[return-value]


class Silent(Laid):
    def forward(self, x: torch.Tensor) -> None:  # type: ignore[override]
        self.held.sub_(x.sum(0))  # type: ignore[operator]


def write_laid(directory: Path) -> None:
    """Two programs over one buffer, of which one returns nothing; exported with a transposed input."""
    module, x = Laid(), torch.ones(3, 4).t()
    silent = Silent()
    silent.held = module.held
    sizes = ({0: Dim("rows", min=2, max=9)},)
    made = {"laid": export(module, (x,), dynamic_shapes=sizes), "silent": export(silent, (x,), dynamic_shapes=sizes)}
    tpcompiler.parallelize(made, 1, {}).save(directory, layout="shared")
