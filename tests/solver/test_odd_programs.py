"""Programs that a plan is seldom written for: sizes that data decide, no weights, no dims, one op."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import export

import tpcompiler
from tests.passes.stages import Call
from tests.passes.test_shared_heads import Attention
from tests.zoo.case import randomise
from tpcompiler.solver import build_problem, minimize, task

MACHINE = "ideal"  # as if latencies were none: small models are worth cutting

X, KEEP = torch.arange(24.0).view(6, 4).sin(), torch.tensor([True, False, True, True, False, True])
Forward = Callable[..., Any]


class Net(nn.Module):
    def __init__(self, forward: Forward, is_weighted: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.run = forward
        if is_weighted:
            self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, *args: torch.Tensor) -> Any:
        return self.run(self, *args)


CASES: dict[str, tuple[Forward, tuple[torch.Tensor, ...], bool]] = {
    "a boolean mask": (lambda net, x, keep: net.up(x[keep]), (X, KEEP), True),
    "a mask between layers": (lambda net, x, keep: net.down(net.up(x)[keep].relu()), (X, KEEP), True),
    "nonzero": (lambda net, x, keep: net.down(net.up(x)).index_select(0, keep.nonzero()[:, 0]), (X, KEEP), True),
    "masked_select": (lambda net, x: net.up(x).masked_select(x.sum(-1, True) > 0), (X,), True),
    "experts' rows": (
        lambda net, x, keep: torch.zeros(6, 4).index_add(0, keep.nonzero()[:, 0], net.down(net.up(x[keep]).relu())),
        (X, KEEP),
        True,
    ),
    "a number of no dims": (lambda net, x, scale: net.down(net.up(x) * scale), (X, torch.tensor(2.0)), True),
    "no dims at all": (lambda net, a, b: a * b, (torch.tensor(2.0), torch.tensor(3.0)), False),
    "no weights": (lambda net, x: x.relu() + 1, (X,), False),
    "an input that is an output": (lambda net, x: (x, x.sum()), (X,), False),
    "no elements": (lambda net, x: net.down(net.up(x)), (torch.empty(0, 4),), True),
    "integers alone": (lambda net, i: i.cumsum(-1) % 3, (torch.arange(12).view(3, 4),), False),
}


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("plan", ["auto", "auto:free"])
@pytest.mark.parametrize("mesh", [2, 3, {"dp": 2, "tp": 4}], ids=str)
@pytest.mark.parametrize(("forward", "args", "is_weighted"), CASES.values(), ids=CASES)
def test_odd_programs(
    forward: Forward, args: tuple[torch.Tensor, ...], is_weighted: bool, mesh: Any, plan: str, tmp_path: Path
) -> None:
    made = tpcompiler.parallelize(export(Net(forward, is_weighted), args), mesh, plan)
    assert made.verify(args).ok
    made.save(tmp_path / "out")


def test_without_weights_there_is_nothing_to_name() -> None:
    """A name that the user wrote must match; the entry that stands for `auto` may leave nothing to the search."""
    program = export(Net(lambda net, x: x.relu(), False), (X,))
    assert tpcompiler.parallelize(program, 2, {"**": "auto"}).converted.plan.to_data() == {"**": "auto"}
    with pytest.raises(tpcompiler.PlanError, match=r"'up' matches nothing"):
        tpcompiler.parallelize(program, 2, {"up": "colwise", "**": "auto"})


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["auto", "auto:free"])
def test_where_tables_grow_too_large_fewer_choices_are_looked_at(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer, and a note that it is of fewer choices; the negative control is the search without a limit."""
    x = torch.randn(4, 3, 16)
    program = export(Attention(4, 4, packed=True), (x,))
    free = tpcompiler.parallelize(program, 2, plan)
    assert not capped(free)
    monkeypatch.setattr(minimize, "TOO_SLOW", 100)
    monkeypatch.setattr(minimize, "MOST_CELLS", 100)
    monkeypatch.setattr(build_problem, "TOO_SLOW", 100)
    exact = tpcompiler.parallelize(program, 2, plan)  # as an integer program
    assert not capped(exact)
    assert sent(exact) == sent(free)
    monkeypatch.setattr(minimize, "MOST_INTEGER_CELLS", 100)
    made = tpcompiler.parallelize(program, 2, plan)
    assert capped(made)
    assert made.verify((x,)).ok


def sent(made: tpcompiler.ParallelProgram) -> list[tuple[str, int]]:
    return [(each.kind, each.wire_bytes) for each in made.collectives()]


def capped(made: tpcompiler.ParallelProgram) -> bool:
    return any("have too many choices" in note.text for note in made.converted.resharded.notes)


def test_where_changes_of_sharding_are_too_many_axes_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that may be above the least, and says so; the control searches all axes at once."""
    x = torch.randn(8, 64, 16)
    program = export(Attention(4, 4, packed=True), (x,))
    joined = tpcompiler.parallelize(program, {"dp": 2, "tp": 2}, "auto")
    assert "that is the least of all choices" in joined.report()
    monkeypatch.setattr(build_problem, "MOST_CHANGES", 0)
    made = tpcompiler.parallelize(program, {"dp": 2, "tp": 2}, "auto")
    assert "that is the least found, one axis after the other" in made.report()
    assert made.verify((x,)).ok


def test_a_search_ends_after_so_many_prices_with_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """A softmax of sharded columns, which simpler ops spare their gather."""
    x = torch.randn(4, 12)

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.down(self.up(x).softmax(-1))
        return made

    model = randomise(Call(forward, up=nn.Linear(12, 128), down=nn.Linear(128, 8)))
    program = export(model, (x,))

    def converted() -> tuple[tpcompiler.ParallelProgram, list[str]]:
        made = tpcompiler.parallelize(program, 2, {"up": "colwise", "down": "rowwise"})
        return made, [note.text for note in made.converted.notes if note.text.startswith("the search ended")]

    whole, ended = converted()
    assert not ended
    monkeypatch.setattr(task, "MOST_PRICES", 1)
    short, ended = converted()
    assert re.fullmatch(r"the search ended after [\d,]+ prices: there may be better placements", *ended)
    assert converted()[1] == ended
    assert short.verify((x,)).ok
    assert sum(each.wire_bytes for each in short.collectives()) > sum(each.wire_bytes for each in whole.collectives())
