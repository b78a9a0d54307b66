"""Loops over rows that are unrolled: dims that are sliced at more places than an op has choices."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import ExportedProgram, export

import tpcompiler
from tests.sound import findings
from tests.zoo.case import randomise
from tpcompiler.ir import edit
from tpcompiler.rules import infer
from tpcompiler.rules.registry import rule_of
from tpcompiler.solver import domain as domains
from tpcompiler.solver import turn
from tpcompiler.solver.domain import find_pieces


class Recurrence(nn.Module):
    """Each row of a triangle gets a sum of the rows before it, as in the chunks of a gated delta rule."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows, self.query, self.key, self.out = rows, nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key = (layer(x).unflatten(-1, (4, 8)).transpose(1, 2) for layer in (self.query, self.key))
        scores = (query @ key.mT).tril(-1).clone()
        for i in range(1, self.rows):
            row = scores[..., i, :i].clone()
            scores[..., i, :i] = row + (row.unsqueeze(-1) * scores[..., :i, :i].clone()).sum(-2)
        return self.out((scores @ key).transpose(1, 2).flatten(2))


@cache
def exported(rows: int) -> ExportedProgram:
    torch.manual_seed(0)
    return export(randomise(Recurrence(rows)), (torch.randn(2, rows, 16),))


def count_shardings(rows: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the number of options of ops that the search looks at."""
    counter = itertools.count()

    def counting(*args: Any) -> Any:
        next(counter)
        return infer.shardings(*args)

    with monkeypatch.context() as patch:
        patch.setattr(turn, "shardings", counting)
        tpcompiler.parallelize(exported(rows), 2, "auto")
    return next(counter)


def pieces_of(rows: int) -> dict[str, frozenset[str]]:
    graph = exported(rows).run_decompositions({}).graph
    calls = [node for node in edit.calls(graph) if edit.outputs(node)]
    found = find_pieces({node: edit.operands(node) for node in calls}, {node: rule_of(node) for node in calls}, 20)
    return {node.name: factors for node, factors in found.items()}


@pytest.mark.slow
def test_pieces_of_long_loops_only() -> None:
    """The ops that slice rows and columns, and put rows back, have a part and what is next to it."""
    assert pieces_of(12) == {}
    found = pieces_of(24)
    assert {name.rstrip("_0123456789") for name in found} == {"slice", "slice_scatter"}
    assert set().union(*found.values()) == {"c", "x", "z", "_x", "_z"} - {"x", "_x"}


@pytest.mark.slow
@pytest.mark.parametrize("machine", ["ideal", "h100"])
def test_numbers(machine: str) -> None:
    """The report says that choices are left out."""
    made = tpcompiler.parallelize(exported(24), 2, "auto", machine=machine)
    assert made.verify((torch.randn(2, 24, 16),)).ok
    assert not findings(made)
    assert any("too many choices" in note.text for note in made.converted.resharded.notes)


@pytest.mark.slow
def test_work_grows_with_the_number_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (count_shardings(rows, monkeypatch) for rows in (30, 60))
    assert many < 2.2 * few
    monkeypatch.setattr(domains, "find_pieces", lambda *_: {})  # what it would be if each piece were cut by itself
    assert count_shardings(60, monkeypatch) > 2 * many


def test_single_rows_are_no_pieces() -> None:
    """A loop over steps of one row leaves nothing that could be cut."""

    class Steps(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([x[:, step : step + 1].sin() for step in range(30)], 1)

    made = tpcompiler.parallelize(export(Steps(), (torch.randn(2, 30, 16),)), 2, "auto")
    assert not any("too many choices" in note.text for note in made.converted.resharded.notes)
