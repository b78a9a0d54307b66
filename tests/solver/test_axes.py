"""Several axes: solved at once where the tables allow it, otherwise in two orders."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.export import ExportedProgram, export

import tpcompiler
from tests.zoo.index import CASES
from tpcompiler.api.request import Request
from tpcompiler.cost.fusion import NO_KERNEL
from tpcompiler.cost.machine import Link, Machine
from tpcompiler.cost.objective import Objective, local_bytes, local_work
from tpcompiler.ir.constraints import AnyStyle, AsUsed
from tpcompiler.ir.program import PlannedProgram, pin
from tpcompiler.ir.sharding import Sharding
from tpcompiler.parallel.pipeline import make_task, plan_program
from tpcompiler.solver import domain as domains
from tpcompiler.solver import minimize
from tpcompiler.solver import search as searches
from tpcompiler.solver.build_problem import build_problem
from tpcompiler.solver.domain import shardings_of_pin
from tpcompiler.solver.minimize import Tables
from tpcompiler.solver.problem import UNIT, Problem
from tpcompiler.solver.search import PLACING, search, solve
from tpcompiler.solver.solution import Turns
from tpcompiler.solver.task import Task
from tpcompiler.solver.turn import Turn

MESH = {"dp": 2, "tp": 2}
SLOW = Objective.of(Machine(1e13, 1e11, 8e10, {("", 0): [Link(3e-6, 7e10)]}))
TP_FIRST: Turns = (("tp",), ("dp",))
DP_FIRST: Turns = (("dp",), ("tp",))
AT_ONCE: Turns = (("dp", "tp"),)


class Half(nn.Module):
    """Of the whole batch a cut over tp pays, of half of it no more: the axis of the batch must come first."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 256, bias=False), nn.Linear(256, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.down(torch.relu(self.up(x)))
        return made


CUT: dict[str, Any] = {"inputs": {"x": {"dp": "S(0)"}}, "outputs": [{"dp": "S(0)"}]}
WHOLE: dict[str, Any] = {"inputs": {"x": {"dp": "S(0)"}}}
X = torch.randn(256, 8)


@cache
def exported() -> ExportedProgram:
    torch.manual_seed(0)
    return export(Half(), (X,))


def planned(**boundary: Any) -> list[PlannedProgram]:
    conversions = Request(exported(), MESH, **boundary).conversions()
    return [plan_program(own, own.plan) for own in conversions.values()]


def seconds(programs: list[PlannedProgram], turns: Turns) -> float:
    return search(Task(programs, SLOW, turns=turns)).seconds


def test_the_order_of_the_axes_matters() -> None:
    programs = planned(**CUT)
    assert seconds(programs, AT_ONCE) == seconds(programs, DP_FIRST) < 0.99 * seconds(programs, TP_FIRST)
    found = solve(Task(programs, SLOW), PLACING)
    assert (found.seconds, found.turns, found.above) == (seconds(programs, AT_ONCE), AT_ONCE, 0.0)


@pytest.mark.parametrize("boundary", [CUT, WHOLE], ids=["cut", "whole"])
def test_at_once_is_the_least_of_all(boundary: dict[str, Any]) -> None:
    """Against every choice of every op, priced without tables."""
    programs = planned(**boundary)
    parts = [Turn(programs[0].mesh, (axis,), {}, AnyStyle() if axis == "tp" else AsUsed()) for axis in ("dp", "tp")]
    problem = build_problem(programs, Turn.together(parts), SLOW, {})
    least = min(brute_force(problem))
    assert solve(Task(programs, SLOW), PLACING).seconds == pytest.approx(least, rel=1e-6)


def brute_force(problem: Problem) -> Iterator[float]:
    """The seconds of every placement; of those that gather a weight, or cut it as no style does, infinite."""
    (domain,), turn = problem.domains, problem.turn
    program, mesh = domain.program, turn.mesh
    leaves = dict(program.leaves())
    given = {
        node: turn.within(program.constraints[node.name].sharding, node.meta["val"]) for node in program.user_inputs()
    }
    calls = [node for node in domain.operands if node.target is pin or node in domain.strategies]
    each = [
        [(None, (each,), (each,)) for each in shardings_of_pin(domain, node)]
        if node.target is pin
        else [(each.option, each.wants, each.made) for each in domain.strategies[node]]
        for node in calls
    ]
    for some in itertools.product(*each):
        made: dict[fx.Node, Sharding] = dict(given)
        total = 0.0
        for node, (option, wants, results) in zip(calls, some, strict=True):
            made[node] = results[0]
            for user in node.users:
                if user.target is not pin and isinstance(user.args[-1], int) and user not in domain.operands:
                    made[user] = results[user.args[-1]]
            for operand, want in zip(domain.operands[node], wants, strict=True):
                value = operand.meta["val"]
                if operand not in leaves:
                    total += SLOW.change_seconds(made[operand], want, value, mesh)
                    continue
                over_tp = [dim for dim, cut in enumerate(want.axis_part("tp").dims) if cut.axes]
                total += math.inf if len(over_tp) > 1 or want.partial else 0.0
                total += SLOW.storage_seconds(local_bytes(value, want, mesh))
            if option is None:
                continue
            tensors = [operand.meta["val"] for operand in domain.operands[node]]
            tensors += [v for v in torch.utils._pytree.tree_leaves(node.meta["val"]) if isinstance(v, torch.Tensor)]
            values = list(zip(tensors, (*wants, *results), strict=True))
            kernel = domain.kernels.get(node, NO_KERNEL)
            total += SLOW.work_seconds(kernel, local_work(node, domain.rules[node], option, mesh), values, mesh)
            total += SLOW.tie_seconds(values, mesh)
        yield total


@pytest.mark.slow
@pytest.mark.parametrize(("name", "is_planned"), [("llama", True), ("mixtral", False), ("llama_1_kv", False)])
def test_models_reach_the_optimum_over_two_axes(name: str, is_planned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against HiGHS on the whole problem: a model with a plan, one with experts, and one whose heads share keys."""
    case, solved = CASES[name], list[tuple[float, float]]()
    monkeypatch.setattr(minimize, "MOST_INTEGER_CELLS", 1 << 20)

    def eliminate(tables: Tables, most: int) -> tuple[float, list[int]]:
        found = minimize.eliminate(tables, most)
        solved.append((found[0], minimize.solve_integer_program(tables)[0]))
        return found

    monkeypatch.setattr(searches, "eliminate", eliminate)
    plan = case.asked() if is_planned else "auto"
    request = Request(
        case.export(False), {"dp": 2, "tp": 4}, plan, inputs={"input_ids": {"dp": "S(0)"}}, machine="ideal"
    )
    (own,) = request.conversions().values()
    found = solve(make_task([own]), PLACING)
    assert all(eliminated == integer for eliminated, integer in solved)
    assert (found.seconds, found.turns) == (pytest.approx(min(solved)[0] * UNIT), AT_ONCE)


@pytest.mark.parametrize("boundary", [CUT, WHOLE], ids=["cut", "whole"])
def test_too_large_tables_give_the_better_order(boundary: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    programs = planned(**boundary)
    least = seconds(programs, AT_ONCE)
    monkeypatch.setattr(domains, "MOST_TOGETHER", 1)
    found = solve(Task(programs, SLOW), PLACING)
    assert found.seconds == min(seconds(programs, turns) for turns in (TP_FIRST, DP_FIRST))
    assert len(found.turns) == 2
    assert found.styles
    assert found.seconds >= least
    assert found.above is None


class Normed(nn.Module):
    """A pending sum that a norm refuses, next to a batch of two: they are samples, and no heads that ranks could share."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64, bias=False), nn.Linear(64, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.down(torch.relu(self.up(x)))
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


def test_a_small_batch_is_not_taken_for_heads() -> None:
    program = export(Normed(), (torch.randn(2, 1, 16),))
    request = Request(program, {"dp": 2, "tp": 4}, inputs={"x": {"dp": "S(0)"}}, machine="ideal")
    (own,) = request.conversions().values()
    assert search(replace(make_task([own]), turns=DP_FIRST)).heads == ()


@pytest.mark.slow
def test_the_report_names_what_the_plan_fixed_and_what_freedom_was_used_for() -> None:
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    exported = export(layers, (torch.randn(4096, 8),))

    def texts(plan: Any) -> list[str]:
        made = tpcompiler.parallelize(exported, {"dp": 2, "tp": 2}, plan, machine="ideal")
        return [own.text for own in made.converted.notes if own.kind == "search"]

    fixed = [text for text in texts({"0": "colwise", "**": "auto"}) if text.startswith("the plan places")]
    assert len(fixed) == 1
    assert re.fullmatch(r"the plan places 0; without its entries a call would take [\d.]+ ns less", fixed[0])
    same = texts({"0": "replicate", "**": "auto"})  # as the search would have it
    assert same == texts("auto")
    assert not any(text.startswith("the plan places") for text in same)
    free = texts("auto:free")
    assert "the batch is not cut, and no weight is gathered for use" in free  # its output is whole on every rank
    assert "that is the least of all choices that were compared, over dp and tp at once" in free
    made = tpcompiler.parallelize(exported, {"tp": 2}, "auto:free", machine="ideal", outputs=["S(0)"])
    assert "the batch is cut over tp" in made.report()
    assert made.verify((torch.randn(4096, 8),)).ok
