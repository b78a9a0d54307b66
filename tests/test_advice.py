"""Errors and fallback gathers name the cheapest change of the plan that does without them: each is tried here again."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import tpcompiler
from tests.bad_input.models import PLAN, Net, X, exported
from tests.passes.stages import Call
from tpcompiler.errors import ShardingError
from tpcompiler.parallel import advice
from tpcompiler.terminal.printed import format_bytes

CHANGE = (
    r"(?:change '([^']+)' from \w+ to (\w+)|pin '([^']+)' to (R)) \((?:each rank sends )?([\d.]+ k?B) (?:less|sent)"
)


def changes_in(text: str) -> list[tuple[str, str, str]]:
    """(name, style or placement, bytes) of every change that a text advises."""
    found = re.findall(CHANGE, text)
    return [(name or leaf, style or whole, count) for name, style, leaf, whole, count in found]


def spent(made: tpcompiler.ParallelProgram) -> int:
    return sum(c.wire_bytes for c in made.collectives())


def running(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.down(self.up(x).cumsum(-1))


def inverse(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.both(x) + torch.linalg.matrix_exp(self.down.weight[:, :8])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "plan"),
    [
        (inverse, {"down.weight": "S(0)"}),
        (inverse, {"down": "rowwise", "up": "colwise"}),
        (None, {**PLAN, "down.bias": "S(0)"}),
        (None, {"up.weight": "P(max)"}),
    ],
)
def test_what_an_error_advises_compiles(function: Any, plan: dict[str, str]) -> None:
    x = torch.randn(8, 8)
    program = exported(Net(function, hidden=8), x)
    with pytest.raises(ShardingError) as raised:
        tpcompiler.parallelize(program, 2, plan)
    ((name, style, count),) = changes_in(raised.value.help)
    made = tpcompiler.parallelize(program, 2, {**plan, name: style})
    assert format_bytes(spent(made)) == count
    assert made.verify((x,)).ok


def test_the_words_of_an_error() -> None:
    with pytest.raises(ShardingError) as raised:
        tpcompiler.parallelize(exported(Net(), X), 2, {**PLAN, "down.bias": "S(0)"})
    assert str(raised.value).splitlines()[:2] == [
        "cannot shard 'down.bias' on dim 0 of 8 by mesh axis 'tp' of 2 for aten.linear.default: other operands are cut "
        "differently",
        "  help: pin 'down.bias' to R (128 B sent per rank and call)",
    ]


def test_placements_by_axis() -> None:
    with pytest.raises(ShardingError, match=r"pin 'down.bias' to R"):
        tpcompiler.parallelize(exported(Net(), X), {"dp": 2, "tp": 2}, {**PLAN, "down.bias": {"tp": "S(0)"}})


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_what_the_report_advises_leaves_out_the_gather(world: int) -> None:
    program = exported(Net(running), X)
    made = tpcompiler.parallelize(program, world, PLAN)
    gather, *_ = [c for c in made.collectives() if c.why == "fallback"]  # or two all_to_all, there and back
    lines = made.report().splitlines()
    at = next(number for number, line in enumerate(lines) if gather.reason in line)
    assert lines[at + 1].startswith("  help: ")
    ((name, style, saved),) = changes_in(lines[at + 1])
    better = tpcompiler.parallelize(program, world, {**PLAN, name: style})
    assert not any(c.why == "fallback" for c in better.collectives())
    assert format_bytes(spent(made) - spent(better)) == saved
    assert spent(made) > spent(better)
    more = better.parameter_bytes()[1][0] - made.parameter_bytes()[1][0]
    assert f"each rank holds {format_bytes(more)} more" in lines[at + 1]
    assert better.verify((X,)).ok


@pytest.mark.slow
def test_two_layers_that_are_the_wrong_way_round() -> None:
    """Neither change by itself saves as much."""
    net = Net(lambda self, x: self.both(x).cumsum(-1).amax(-1))
    plan = {"up": "rowwise", "down": "colwise"}
    made = tpcompiler.parallelize(exported(net, X), 2, plan)
    (said,) = [line for line in made.report().splitlines() if line.startswith("  help: ")]
    change = "change 'up' from rowwise to colwise and 'down' from colwise to rowwise"
    found = re.fullmatch(rf"  help: {change} \(each rank sends (\d+) B less per call\)", said)
    assert found
    better = tpcompiler.parallelize(exported(net, X), 2, {"up": "colwise", "down": "rowwise"})
    assert spent(made) - spent(better) == int(found[1]) > 0
    alone = [
        tpcompiler.parallelize(exported(net, X), 2, {**plan, **one}) for one in ({"up": "colwise"}, {"down": "rowwise"})
    ]
    assert all(spent(better) < spent(other) for other in alone)


def test_a_repeated_layer_is_changed_as_the_plan_names_it() -> None:
    net = Net(lambda self, x: self.layers(x), layers=nn.Sequential(Net(running), Net(running)))
    made = tpcompiler.parallelize(exported(net, X), 2, {"layers.*.up": "colwise", "layers.*.down": "rowwise"})
    helps = [line for line in made.report().splitlines() if line.startswith("  help: ")]
    assert len(helps) == 1  # for both layers
    assert {name for line in helps for name, _, _ in changes_in(line)} == {"layers.*.up"}
    assert "fallback: 2 all_gather of " in made.report()


def test_no_advice_where_nothing_is_saved() -> None:
    """An input that is cut because the caller says so."""
    made = tpcompiler.parallelize(exported(Net(lambda self, x: x.sort(0).values.amax(0)), X), 2, {}, inputs=["S(0)"])
    assert [c.why for c in made.collectives()] == ["fallback", "plan-demanded"]  # columns for rows; the result
    assert "help:" not in made.report()


@pytest.mark.slow
def test_advice_is_what_the_search_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: where it may change nothing there is none, and the error keeps its own help."""
    monkeypatch.setattr(advice, "_opened", lambda now, other, entries: now)
    with pytest.raises(ShardingError) as raised:
        tpcompiler.parallelize(exported(Net(), X), 2, {**PLAN, "down.bias": "S(0)"})
    assert raised.value.help == "pin 'down.bias' to R in the plan"
    assert "help:" not in tpcompiler.parallelize(exported(Net(running), X), 2, PLAN).report()


@pytest.mark.parametrize(
    ("pin", "style", "cuts", "sharding"),
    [
        ("down", "rowwise", "whole groups of 32", "S(1, unit 32)"),
        ("down.weight", "rowwise", "each of its groups of 32 by itself", "S(1, block 32)"),
    ],
)
def test_a_placement_that_cuts_a_group(pin: str, style: str, cuts: str, sharding: str) -> None:
    """Three groups of 32 on two ranks: the style of the same dim cuts where the groups end."""

    def dequantised(self: Any, x: torch.Tensor) -> torch.Tensor:
        weight = (self.weight.view(8, 3, 32).float() * self.scale[..., None]).view(8, 96)
        return nn.functional.linear(x, weight)

    integers = torch.randint(-8, 8, (8, 96), dtype=torch.int8)
    down = Call(dequantised, weight=integers, scale=torch.rand(8, 3) / 100)
    program = exported(Call(lambda self, x: self.down(self.up(x)), up=nn.Linear(8, 96), down=down), X)
    with pytest.raises(ShardingError) as raised:
        tpcompiler.parallelize(program, 2, {pin: "S(1)"})
    assert "dim 1 splits into 3 x 32, and 3 is not divisible by 2" in raised.value.message
    said = re.fullmatch(
        r"change '(.*)' from S\(1\) to (\w+), which cuts (.*) \([\d.]+ k?B sent .*\)", raised.value.help
    )
    assert said
    assert said.groups() == (pin, style, cuts)
    made = tpcompiler.parallelize(program, 2, {pin: style})
    assert made.verify((X,)).ok
    assert {row.name: row.sharding for row in made.manifest().tensors}["down.weight"] == sharding
