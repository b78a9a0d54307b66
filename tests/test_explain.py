"""`tpcompiler explain`: what the files say of a value, and what its other choices cost."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch.export import ExportedProgram

import tpcompiler
from tests.runtime.commands import right
from tests.runtime.models import export_mlp
from tests.solver.test_auto import mlp
from tpcompiler import Mesh, Plan
from tpcompiler.cost.machine_file import read_machine
from tpcompiler.cost.objective import Objective
from tpcompiler.errors import ShardingError
from tpcompiler.ir.constraints import AnyStyle
from tpcompiler.ir.program import PlannedProgram
from tpcompiler.passes.apply_plan import apply_plan
from tpcompiler.passes.canonicalize import canonicalize
from tpcompiler.report import again
from tpcompiler.report.written import Written
from tpcompiler.runtime import rank_file
from tpcompiler.solver.build_problem import build_problem
from tpcompiler.solver.problem import UNIT
from tpcompiler.solver.search import PLACING, solve
from tpcompiler.solver.solution import Solution
from tpcompiler.solver.task import Task
from tpcompiler.solver.turn import Turn
from tpcompiler.solver.what_if import price_otherwise

MACHINE = "ideal"  # as if latencies were none: small models are worth cutting

PAGE = Path(__file__).parents[1] / "docs" / "search.md"


@pytest.fixture(scope="module")
def by_hand(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The layer of docs/search.md, with a plan and without."""
    path = tmp_path_factory.mktemp("by_hand")
    tpcompiler.parallelize(mlp(), 2, "auto").save(path / "auto")
    tpcompiler.parallelize(mlp(), 2, {"up": "colwise", "down": "rowwise"}).save(path / "plan")
    return path


@pytest.mark.slow
@pytest.mark.skipif(not PAGE.exists(), reason="an installed wheel has no docs beside the tests")
@pytest.mark.parametrize("kind", ["auto", "plan"])
def test_the_prices_of_the_layer_by_hand(by_hand: Path, kind: str) -> None:
    said = re.findall(r"^\| (.*?) \|.*\| ([\d.]+) ns \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    nanoseconds = {choice: float(total) for choice, total in said}
    least = nanoseconds["`up` colwise, `down` rowwise"]
    # A plan pins `up`; without one it is better whole then.
    other = nanoseconds["both colwise" if kind == "plan" else "`up` whole, `down` colwise"]
    sent, more = ((16_384 + 4_096) // 2, 0) if kind == "plan" else (4_096 // 2, 32_768)
    for name in ("down.weight", "linear_1", "all_reduce"):
        found = tpcompiler.open(by_hand / kind).explain(name)
        assert found.seconds is not None
        assert found.seconds * 1e9 == pytest.approx(least, abs=0.05)
        chosen, *others = found.alternatives
        assert (chosen.is_chosen, chosen.seconds, chosen.wire_bytes) == (True, 0, 0)
        makes = ("S(0)",) if name == "down.weight" else ("S(2)",)
        colwise = next(each for each in others if each.makes == makes)
        assert colwise.seconds is not None
        assert colwise.seconds * 1e9 == pytest.approx(other - least, abs=0.1)
        assert (colwise.wire_bytes, colwise.held_bytes) == (sent - 4_096, more)


def test_prices_are_the_least_of_all_assignments() -> None:
    """Every assignment of the variables of the whole problem, tried one by one."""
    program = apply_plan(canonicalize(mlp()), Plan().with_search(), Mesh.of(2))
    task = Task([program], Objective.of(read_machine()))
    found = solve(task, PLACING)
    problem = build_problem([program], Turn(program.mesh, ("tp",), {}, AnyStyle()), Objective.of(read_machine()), {})
    tables = problem.tables_at(Objective.of(read_machine()).byte_price)
    totals = numpy.full(tables.sizes, tables.constant)
    for variables, table in tables.factors:
        shape = [size if at in variables else 1 for at, size in enumerate(tables.sizes)]
        order = sorted(range(len(variables)), key=variables.__getitem__)
        totals = totals + table.transpose(order).reshape(shape)
    assert totals.size > 500
    for node, variable in problem.variables.items():
        others = tuple(at for at in range(len(tables.sizes)) if at != variable)
        least = totals.min(others) * UNIT
        prices = price_otherwise(found, node, task)
        assert [each.solution.seconds for each in prices] == pytest.approx(list(least))
        assert min(least) == found.seconds
        assert sum(map(math.isfinite, least)) > 1


@pytest.mark.slow
@pytest.mark.sweep(2)
@pytest.mark.parametrize(("program", "mesh"), [(export_mlp(), 2), (mlp(), {"dp": 2, "tp": 2})], ids=["tp", "dp, tp"])
def test_what_the_search_found_is_the_cheapest(tmp_path: Path, program: ExportedProgram, mesh: Any) -> None:
    """Of every value and parameter, and no other choice is the artifact's."""
    tpcompiler.parallelize(program, mesh, "auto").save(tmp_path / "out")
    opened = tpcompiler.open(tmp_path / "out")
    names = Written.of(opened.only).names()
    assert {"x", "linear", "relu", "linear_1"} <= set(names)
    for name in names:
        alternatives = opened.explain(name).alternatives
        axes = {each.axis for each in alternatives}
        assert axes in (set(), {"tp"} if mesh == 2 else {"tp", "dp"})
        chosen = [each.seconds for each in alternatives if each.is_chosen]
        assert chosen == [0.0] * len(axes) or mesh != 2, name  # of several axes each is solved after the other
        assert len(chosen) == len(axes)
        assert all(each.seconds is None or each.seconds >= 0 for each in alternatives)


def test_the_search_again_has_the_goal_of_the_conversion(tmp_path: Path) -> None:
    """On an H100 nothing is worth cutting here but for its bytes; the prices stay seconds."""
    program = torch.export.export(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), (torch.ones(8, 64),))
    tpcompiler.parallelize(program, 2, "auto", machine="h100", optimize="memory").save(tmp_path / "out")
    found = tpcompiler.open(tmp_path / "out").explain("0.weight")
    assert found.reason == "the search: colwise"
    assert [each.makes for each in found.alternatives if each.is_chosen] == [("S(0)",)]
    assert found.alternatives[0].makes == ("R",)  # faster, and not chosen


def test_an_opened_artifact_is_read_and_searched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On each machine; a second question has the answer that it has by itself."""
    tpcompiler.parallelize(mlp(), 2, {"up": "rowwise", "**": "auto"}).save(tmp_path / "out")
    opened, done = tpcompiler.open(tmp_path / "out"), list[str]()
    for module, name in ((rank_file, "load_program"), (again, "solve_task")):
        plain = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, plain=plain, name=name: (done.append(name), plain(*args))[1])
    first = {name: str(opened.explain(name)) for name in ("down.weight", "relu", "up.weight")}
    assert done == ["load_program", "load_program", "solve_task"]
    assert first["relu"] == str(tpcompiler.open(tmp_path / "out").explain("relu")) != first["up.weight"]
    done.clear()
    assert str(opened.explain("relu", machine="h100")) != first["relu"] == str(opened.explain("relu"))
    assert done == ["load_program", "solve_task"]
    searched = again.search_again(opened.only, again.machine_of(opened.manifest().asked, None))
    sizes = len(searched.task.kept), len(searched.task.known)
    assert str(opened.explain("up.weight")) == first["up.weight"]
    assert (len(searched.task.kept), len(searched.task.known)) == sizes  # what only one question needs is not kept


def test_what_a_plan_pins_stays_so(tmp_path: Path) -> None:
    """But for the layer that is asked about; the search was free to choose all else, and chose the cheapest."""
    tpcompiler.parallelize(mlp(), 2, {"up": "rowwise", "**": "auto"}).save(tmp_path / "out")
    found = {name: tpcompiler.open(tmp_path / "out").explain(name) for name in ("down.weight", "linear_1", "relu")}
    for name, each in found.items():
        assert [one.seconds for one in each.alternatives if one.is_chosen] == [0.0], name
        assert "pinned" not in each.reason
    (call,) = {each.seconds for each in found.values()}
    text = right("explain", tmp_path / "out", "up.weight")
    assert re.search(r"^P\(sum\) +never$", text, re.MULTILINE)
    assert "never: the plan, the boundary or the ops leave no placement of the whole program with it" in text
    assert tpcompiler.open(tmp_path / "out").explain("up.weight").reason == 'pinned by the plan ("up": "rowwise")'
    pinned = tpcompiler.open(tmp_path / "out").explain("linear")
    assert pinned.reason.endswith(""" 'up.weight' is pinned by the plan ("up": "rowwise")""")
    (own,) = [one.seconds for one in pinned.alternatives if one.is_chosen]
    assert own is not None
    assert (own > 0, pinned.seconds) == (True, call)


@pytest.mark.slow
def test_choices_that_cost_the_same_are_ties(tmp_path: Path) -> None:
    """A sum may be reduced before it is negated, or after."""

    class Negated(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return -super().forward(x)

    program = torch.export.export(Negated(nn.Linear(8, 6, bias=False)), (torch.randn(2, 8),))
    tpcompiler.parallelize(program, 2, {"0": "rowwise"}).save(tmp_path / "out")
    found = tpcompiler.open(tmp_path / "out").explain("neg").alternatives
    assert [(each.makes, each.is_chosen, each.is_tied) for each in found] == [
        (("R",), True, False),
        (("P(sum)",), False, True),
    ]


def test_a_planned_layer(out: Path) -> None:
    assert_expected_inline(
        right("explain", out, "linear_1"),
        """\
linear_1: linear of layers.0.down at models.py:28, in forward
  f32[3, 8]: P(sum)
  in words: a partial sum on each rank of tp
  why: k is cut by tp, asked by the plan ("layers.*.down": "rowwise")

what ranks hold
ranks  shape   indices
0 1    [3, 8]  [:, :], a sum pending over tp

operands
name                  sharding  needed
relu                  S(1)      S(1)
layers.0.down.weight  S(1)      S(1)
layers.0.down.bias    P(sum)    P(sum)

collectives
name        kind        bytes  wire bytes  why
all_reduce  all_reduce   96 B        96 B  inherent: each rank has a partial sum of 'linear_1'

alternatives (us above the least of these; a call of the artifact takes 1.41 ns on ideal)
makes   needs                   us  wire bytes  held bytes  sends
P(sum)  S(1), S(1), P(sum)  +0.000        +0 B        +0 B  1 all_reduce  the artifact's
S(1)    R, S(0), S(0)       +0.000       +48 B       -16 B  1 all_gather
R       R, R, R             +0.000        +0 B      +256 B  1 all_gather

""",
    )


def test_a_placement_that_cannot_be_carried_out_says_why(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And is not taken for one that there is not."""
    refusing = again.refuse_misfits

    def fail(program: PlannedProgram, found: Solution) -> None:
        leaf = next(node for node, fqn in program.leaves() if fqn == "layers.0.down.weight")
        if found.leaves[leaf].dims[0].axes:
            raise ShardingError("no parts [here]", help="none")
        refusing(program, found)

    monkeypatch.setattr(again, "refuse_misfits", fail)
    found = tpcompiler.open(out).explain("layers.0.down.weight").alternatives
    assert [(each.makes, each.failed) for each in found if each.seconds is None] == [(("S(0)",), "no parts [here]")]
    text = right("explain", out, "layers.0.down.weight")
    assert re.search(r"^S\(0\) +fails$", text, re.MULTILINE)
    assert text.endswith("\nS(0): fails: no parts [here]\n\n")


class Attention(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("heads", "ranks", "priced", "reasons"),
    [(2, 8, [1, 3], {0: "it has fewer than 8 parts"}), (1, 4, [3], dict.fromkeys([0, 1], "it has fewer than 4 parts"))],
)
def test_why_no_all_to_all(heads: int, ranks: int, priced: list[int], reasons: dict[int, str]) -> None:
    """Attention that gathers keys and values: each other dim has a price that its own row has too, or a reason."""
    qkv = tuple(torch.randn(1, heads, 2048, 64) for _ in range(3))
    boundary: dict[str, Any] = {"inputs": ["S(2)"] * 3, "outputs": ["S(2)"], "machine": "h100"}
    program = tpcompiler.parallelize(torch.export.export(Attention(), qkv), {"cp": ranks}, {}, **boundary)
    assert [sent.kind for sent in program.collectives()] == ["all_gather"] * 2
    found = program.explain("scaled_dot_product_attention")
    assert {other.operand for other in found.other_dims} == {"k", "v"}
    values = [other for other in found.other_dims if other.operand == "v"]
    assert [other.dim for other in values if other.seconds is not None] == priced
    assert {other.dim: other.reason for other in values if other.reason} == reasons
    listed = {each.seconds: each.sends for each in found.alternatives}
    for other in values:
        assert other.seconds is None or (other.seconds > 0 and listed[other.seconds] == other.sends)
    assert heads == 1 or next(other.sends for other in values if other.dim == 1) == ("4 all_to_all",)
    # the gather itself answers for its value
    assert program.explain("all_gather").other_dims == [other for other in found.other_dims if other.operand == "k"]


def test_no_other_dims_where_nothing_is_gathered() -> None:
    """Negative control: with a head for each rank it is exchanged."""
    qkv = tuple(torch.randn(1, 16, 2048, 64) for _ in range(3))
    boundary: dict[str, Any] = {"inputs": ["S(2)"] * 3, "outputs": ["S(2)"], "machine": "h100"}
    program = tpcompiler.parallelize(torch.export.export(Attention(), qkv), {"cp": 8}, {}, **boundary)
    assert [sent.kind for sent in program.collectives()] == ["all_to_all"] * 4
    assert program.explain("scaled_dot_product_attention").other_dims == []
