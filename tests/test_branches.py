"""A cond that uses a planned weight: both branches are computed, in the graph, and one of the results is chosen."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._higher_order_ops.map import map as map_rows
from torch.export import Dim, ExportedProgram

import tpcompiler
from tests.bad_input.models import PLAN, Net, X, exported, refusal
from tests.compared import compare
from tests.launch import called
from tests.test_control_flow import choose, choose_twice, program_of
from tests.trust.damage import Artifact
from tpcompiler.errors import InternalError
from tpcompiler.ir.control_flow import all_calls, has_bodies
from tpcompiler.judge.sound.check import check_programs
from tpcompiler.judge.sound.written import read_ranks
from tpcompiler.parallel.program_subject import layout_of
from tpcompiler.passes.canonicalize import canonicalize
from tpcompiler.runtime.artifact import read_manifest

MACHINE = "ideal"  # as if latencies were none: small models are worth cutting


def both_planned(self: Any, x: torch.Tensor) -> Any:
    y = self.both(x)
    return torch.cond(
        x.sum() > 0, lambda y: (self.side(y), y.sum(-1)), lambda y: (self.side(y).t().neg().t(), y.amax(-1)), (y,)
    )


def layers_in_a_branch(self: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.cond((x.sum() > 0).view(1), lambda x: self.both(x), lambda x: self.side(x), (x,))


def one_after_the_other(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = torch.cond(x.sum() > 0, lambda y: self.side(y), lambda y: -y, (self.both(x),))
    return torch.cond(y.sum() > 0, lambda y: self.side(y) * 3, lambda y: self.side(y), (self.side(y),))


PLANNED = [choose, choose_twice, both_planned, layers_in_a_branch, one_after_the_other]
STYLES = [{"side": "colwise"}, {"side": "rowwise"}, {"side": "colwise_gather_output"}, {"side.weight": "S(0)"}]


@cache
def planned_program(function: Callable[..., Any], is_dynamic: bool) -> ExportedProgram:
    shapes = {"dynamic_shapes": (((Dim("batch", min=2, max=64), None),),)} if is_dynamic else {}
    return program_of(function, **shapes)


def calls_cond(made: tpcompiler.ParallelProgram) -> bool:
    return any(has_bodies(node) for node in all_calls(made.converted.resharded.graph))


@pytest.mark.sample(1)
@pytest.mark.sweep
@pytest.mark.parametrize("is_dynamic", [False, True])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("style", STYLES, ids=str)
@pytest.mark.parametrize("function", PLANNED)
def test_a_planned_weight_in_a_branch(
    function: Callable[..., Any], style: dict[str, str], world: int, is_dynamic: bool, tmp_path: Path
) -> None:
    program = planned_program(function, is_dynamic)
    made = tpcompiler.parallelize(program, world, {**PLAN, **style})
    assert not calls_cond(made)
    made.save(tmp_path / "out")  # it is checked
    assert tpcompiler.open(tmp_path / "out").verify((X.abs(),), original=program, then=[(-X.abs(),), (X,)]).ok
    assert [c for c in made.collectives() if c.why == "fallback"] == []
    weight = dict(made.rank_program(0).state_dict)["side.weight"]
    assert weight.numel() == 64 // world


def test_both_branches_are_reported() -> None:
    made = tpcompiler.parallelize(program_of(choose), 2, {**PLAN, "side": "colwise"})
    title = "conds of which both branches are computed:"
    assert f"{title}\n  'cond' at models.py:35, in forward: 2 + 1 ops, as the plan cuts 'side.weight'" in made.report()


@pytest.mark.sample(1)
@pytest.mark.parametrize(("plan", "world"), [(PLAN, 2), ({**PLAN, "side": "R"}, 2), ({"**": "auto"}, 2), (PLAN, 1)])
def test_a_cond_without_a_cut_weight_stays_whole(plan: dict[str, str], world: int) -> None:
    made = tpcompiler.parallelize(program_of(choose), world, plan)
    assert calls_cond(made)
    artifact = Artifact.of(made)
    assert check_programs(artifact.written(), artifact.manifest).ok
    bodies = artifact.ranks[0].graph.find_nodes(op="get_attr")
    assert len(bodies) == 2
    assert [node.name for node in bodies if "val" in node.meta] == []  # the check leaves the program as it was
    assert "both branches" not in made.report()


def test_the_rest_left_to_the_search() -> None:
    made = tpcompiler.parallelize(program_of(choose), 2, {"**": "auto", "side": "colwise"})
    assert not calls_cond(made)
    assert made.verify((X.abs(),)).ok
    assert made.verify((-X.abs(),)).ok


def test_nan_of_the_other_branch_does_not_leak(tmp_path: Path) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda y: self.side(y), lambda y: (self.side(y) / 0.0).log(), (self.both(x),))

    program = program_of(forward)
    tpcompiler.parallelize(program, 2, {**PLAN, "side": "colwise"}).save(tmp_path / "out")
    calls = [(X.abs(),), (-X.abs(),)]
    for own in called([calls, calls], tmp_path):
        for got, given in zip(own, calls, strict=True):
            torch.testing.assert_close(got, program.module()(*given), rtol=1e-4, atol=1e-5, equal_nan=True)
        assert own[0].isfinite().all()
        assert own[1].isnan().any()


IDS = torch.tensor([0, 1, 2, 3])


def look_up(self: Any, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    taken = self.both(x), ids
    return torch.cond(x.sum() > 0, lambda y, i: self.side(y) + F.embedding(i, self.table), lambda y, i: -y, taken)


def divide(self: Any, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    taken = self.both(x), ids
    return torch.cond(x.sum() > 0, lambda y, i: self.side(y) + (8 // i)[:, None], lambda y, i: -y, taken)


def draw(self: Any, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda y: self.side(y) + torch.rand_like(y), lambda y: -y, (self.both(x),))


def draw_deeper(self: Any, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    def inner(y: torch.Tensor) -> torch.Tensor:
        return torch.cond(y.mean() > 0, lambda y: torch.rand_like(y), lambda y: y + 1, (y,))

    return torch.cond(x.sum() > 0, lambda y: self.side(y), inner, (self.both(x),))


def scan_in_a_branch(self: Any, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    def rows(y: torch.Tensor) -> torch.Tensor:
        return map_rows(lambda row: row * 2, y)

    return torch.cond(x.sum() > 0, lambda y: self.side(y), rows, (self.both(x),))


def choose_by_mask(self: Any, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda y: self.side(y), lambda y: y + y[y[:, 0] > 0].sum(), (self.both(x),))


def choose_by_size(self: Any, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.shape[0] > 4, lambda y: self.side(y), lambda y: -y, (self.both(x),))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("function", "why"),
    [
        (look_up, "as a branch looks up positions that may be outside of the dim (embedding)"),
        (divide, "as a branch divides integers by what may be zero (div)"),
        (draw, "as a branch draws random numbers (rand_like)"),
        (draw_deeper, "as a branch draws random numbers (rand_like)"),
        (scan_in_a_branch, "as a branch calls map_impl"),
        (choose_by_mask, "as a branch makes a size or a number of data (index)"),
        (choose_by_size, "as its predicate is computed from sizes"),
    ],
)
def test_a_branch_that_must_be_chosen_to_run(function: Callable[..., Any], why: str) -> None:
    net = Net(function, side=nn.Linear(8, 8), table=torch.randn(5, 8))
    batch = Dim("batch", min=2, max=64)
    shapes = {"dynamic_shapes": (((batch, None), (batch,)),)} if function is choose_by_size else {}
    program = exported(net, X, IDS, **shapes)
    said = refusal(program, {**PLAN, "side": "colwise"})
    assert said.startswith("PlanError: ")
    assert f"cond has no rule for its use of 'side.weight', and runs whole on every rank, {why}" in said
    if function is draw:
        said = refusal(program, {**PLAN, "side.weight": "S(0)"})
        assert f"for cond: its bodies run whole on every rank, {why}" in said
        assert tpcompiler.parallelize(program, 2, PLAN).verify((X.abs(), IDS + 1)).ok


def choose_rarely(self: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 1e9, lambda y: self.side(y).sin(), lambda y: self.side(y) * 2, (self.both(x),))


def choose_another_rarely(self: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 1e9, lambda y: self.side(y).cos(), lambda y: self.side(y) * 2, (self.both(x),))


@pytest.mark.slow
def test_check_compares_the_branch_that_no_input_chooses(tmp_path: Path) -> None:
    """Negative control: the ranks are those of another model in a branch that no random values choose."""
    program = program_of(choose_rarely)
    made = tpcompiler.parallelize(program, 2, {**PLAN, "side": "colwise"})
    made.save(tmp_path / "out")
    manifest = read_manifest(tmp_path / "out")
    ranks = read_ranks(made.only)
    assert check_programs(ranks, manifest, model=canonicalize(program)).findings == []
    other = canonicalize(program_of(choose_another_rarely))
    (finding,) = check_programs(ranks, manifest, model=other).findings
    assert "on random values they differ by" in finding


@pytest.mark.slow
def test_a_wrong_choice_is_seen() -> None:
    """Negative control: a rank that takes the other branch."""
    program = program_of(choose)
    made = tpcompiler.parallelize(program, 2, {**PLAN, "side": "colwise"})
    programs = [made.rank_program(rank) for rank in range(2)]
    for each in programs:
        (choice,) = [node for node in each.graph.nodes if node.target is torch.ops.aten.where.self]
        predicate, *branches = choice.args
        choice.args = (predicate, *reversed(branches))
        each.graph_module.recompile()
    assert not compare(made.only.original(), programs, (X,), {}, layout_of(made.only), ["x_0"], ["output"]).ok


@pytest.mark.slow
def test_both_branches_of_one_that_draws_are_a_finding(tmp_path: Path) -> None:
    """Negative control: the compiler is made to believe that a branch which draws may run in any case."""
    program = exported(Net(draw, side=nn.Linear(8, 8)), X, IDS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tpcompiler.passes.flatten_branches.obstacle", lambda nodes, at_door: "")
        made = tpcompiler.parallelize(program, 2, {**PLAN, "side.weight": "S(0)"})
    with pytest.raises(InternalError, match="the ranks compute both branches of 'cond', and one of them draws"):
        made.save(tmp_path / "out")
