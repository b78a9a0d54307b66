"""Placements without a plan: right, and no worse than the plans that people wrote."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import ExportedProgram, export

import tpcompiler
from tests.zoo.index import CASES
from tpcompiler import ParallelProgram
from tpcompiler.api.request import Request
from tpcompiler.cost.machine_file import read_machine
from tpcompiler.cost.objective import STEP, TIE, Objective
from tpcompiler.errors import ShardingError
from tpcompiler.ir.mesh import Mesh
from tpcompiler.parallel.pipeline import find_placements
from tpcompiler.passes.apply_plan import apply_plan
from tpcompiler.passes.canonicalize import canonicalize
from tpcompiler.plan.plan import Plan
from tpcompiler.solver import build_problem, domain
from tpcompiler.solver.estimate import measure_step_time
from tpcompiler.solver.report import refuse_unplaced
from tpcompiler.solver.search import PLACING, solve
from tpcompiler.solver.task import Task

MACHINE = "ideal"  # as if latencies were none: small models are worth cutting


@cache
def exported(name: str, dynamic: bool = False) -> ExportedProgram:
    return CASES[name].export(dynamic)


def spent(program: ParallelProgram) -> tuple[int, int]:
    """Wire bytes of a call, and the bytes of weights on the rank that holds most."""
    return sum(c.wire_bytes for c in program.collectives()), max(program.parameter_bytes()[1])


def held(program: ParallelProgram) -> int:
    return max(program.parameter_bytes()[1])


def step_of(program: ExportedProgram, mesh: Any, plan: Any, machine: str = "ideal") -> float:
    """Predicted seconds of a call."""
    described = read_machine(machine)
    found = find_placements([*Request(program, mesh, plan, machine=described).conversions().values()])
    return measure_step_time(found, described).total


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def mlp() -> ExportedProgram:
    torch.manual_seed(0)
    return export(Mlp(), (torch.randn(2, 8, 64),))


def test_a_layer_by_hand() -> None:
    """The sums of docs/search.md."""
    program = apply_plan(canonicalize(mlp()), Plan().with_search(), Mesh.of(2))
    objective = Objective.of(read_machine())
    found = solve(Task([program], objective), PLACING)
    assert found.styles == {"up": "colwise", "down": "rowwise"}
    up = (16 * 64 + 128 * 64 + 16 * 128) * 4  # bytes: x, half of the weight, half of the result
    down = (16 * 128 + 64 * 128 + 16 * 64) * 4
    relu, held, sent = 2 * 16 * 128 * 4, 2 * 128 * 64 * 4, 16 * 64 * 4
    rates = objective.machine.memory_bandwidth, objective.machine.links["", 0][0].bandwidth
    ties = TIE * (held + up + relu + down) / rates[0] + STEP
    assert found.seconds == pytest.approx((up + relu + down) / rates[0] + sent / rates[1] + ties)


def test_two_axes_by_hand() -> None:
    """The sums of docs/search.md: what dp leaves of the sum is half, and so is what it gathers of the result."""
    objective, matrix, x, h = Objective.of(read_machine()), 64 * 256 * 4, 16 * 64 * 4, 16 * 256 * 4  # bytes
    rates = objective.machine.memory_bandwidth, objective.machine.links["", 0][0].bandwidth
    for tp, sent in ((2, [x / 2, x / 2]), (1, [x / 2])):  # a sum over tp, a gather over dp
        program = apply_plan(canonicalize(mlp()), Plan().with_search(), Mesh.of({"dp": 2, "tp": tp}))
        found = solve(Task([program], objective), PLACING)
        assert (found.batch, found.turns) == (("dp",), (("dp", "tp") if tp > 1 else ("dp",),))
        moved = 2 * (x / 2 + matrix / tp + h / 2 / tp) + 2 * h / 2 / tp
        ties = TIE * (2 * matrix / tp + moved) / rates[0] + len(sent) * STEP
        assert found.seconds == pytest.approx(moved / rates[0] + sum(sent) / rates[1] + ties)


@pytest.mark.slow
def test_choices_are_found_until_no_op_has_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a mixture one sweep over the ops leaves some out, counts them, and finds slower placements."""

    def solved() -> tuple[float, int]:
        request = Request(exported("mixtral"), 4, "auto", machine=read_machine("ideal"))
        found = find_placements([*request.conversions().values()])
        return found.seconds, found.capped

    seconds, capped = solved()
    monkeypatch.setattr(domain, "MOST_SWEEPS", 1)
    fewer, more_capped = solved()
    assert seconds < 0.99 * fewer
    assert more_capped > capped


@pytest.mark.slow
@pytest.mark.parametrize("is_planned", [True, False], ids=["plan", "auto"])
@pytest.mark.parametrize("name", ["mixtral", "gpt2", "llama_cached"])
def test_no_op_has_a_choice_that_was_not_looked_for(
    name: str, is_planned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only ops near a new choice are looked at again; if nothing were near another op, some choices would be missed."""
    new, find, read = list[int](), domain.find_domain, domain._read_calls

    def find_and_look_again(*args: Any) -> domain.Domain:
        found = find(*args)
        known = dict(found.strategies)
        found.near = read(found.program.graph)[2]
        found.stale = set(found.operands)
        domain._settle_strategies(found)
        new.append(sum(found.strategies[node] is not own for node, own in known.items()))
        return found

    def place() -> None:
        plan = CASES[name].asked() if is_planned else "auto"
        find_placements([*Request(exported(name), 4, plan, machine=read_machine("ideal")).conversions().values()])

    monkeypatch.setattr(build_problem, "find_domain", find_and_look_again)
    place()
    assert len(new) > 0
    assert not any(new)
    monkeypatch.setattr(domain, "_read_calls", lambda graph: (*read(graph)[:2], {node: {node} for node in graph.nodes}))
    place()
    assert any(new)


# A decoder, parallel blocks, experts, an encoder with packed and blocked heads, caches, and one head of keys beside
# the queries in one matrix; a state space whose one matrix can be cut in more ways than an op may have.
BETTER = ["llama", "gpt_neox", "qwen3_moe", "bert", "bloom", "gpt2", "llama_cached", "falcon_7b", "mamba2"]


@pytest.mark.slow
@pytest.mark.sweep(5)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", BETTER)
def test_no_worse_than_the_experts_plan(name: str, world: int) -> None:
    case, program = CASES[name], exported(name)
    auto = tpcompiler.parallelize(program, world, "auto")
    assert auto.verify((), case.inputs(*case.example)).ok
    assert step_of(program, world, "auto") <= step_of(program, world, case.asked()) * 1.001  # ties
    least = tpcompiler.parallelize(program, world, "auto", optimize="memory")
    assert least.verify((), case.inputs(*case.example)).ok
    assert held(least) <= min(held(auto), held(tpcompiler.parallelize(program, world, case.asked())))


def test_convolutions_at_their_optimum() -> None:
    """Two blocks of two convolutions reduce once each; column by column each would be gathered."""
    case, program = CASES["resnet"], exported("resnet")
    auto = tpcompiler.parallelize(program, 2, "auto")
    assert auto.verify((), case.inputs(*case.example)).ok
    assert spent(auto)[0] <= 0.71 * spent(tpcompiler.parallelize(program, 2, case.asked()))[0]


def test_nothing_fits() -> None:
    """A weight pinned as its op cannot take it, which is not gathered; the other entry has no part in it."""
    program = canonicalize(export(nn.LayerNorm(8), (torch.randn(2, 8),)))
    planned = apply_plan(program, Plan.of({"bias": "R", "weight": "S(0)"}).with_search(), Mesh.of(2))
    task = Task([planned], Objective.of(read_machine()))
    with pytest.raises(ShardingError, match="no placement of all values suits what is asked for") as error:
        refuse_unplaced(task, solve(task))
    assert error.value.facts["asked by"] == 'the plan ("weight": "S(0)")'
