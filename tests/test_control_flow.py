"""Control flow runs whole on every rank: right at 2 and 4 ranks, in memory and from files, nested, with weights inside."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.export import Dim, ExportedProgram
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import tpcompiler
from tests.bad_input.models import PLAN, Net, X, exported, refusal
from tests.launch import called
from tpcompiler._torch import symbols_of
from tpcompiler.errors import InternalError, UnsupportedError
from tpcompiler.ir import edit
from tpcompiler.ir.bodies import all_calls, has_bodies
from tpcompiler.passes.canonicalize import canonicalize
from tpcompiler.runtime.artifact import read_manifest
from tpcompiler.soundness.check import check_programs
from tpcompiler.soundness.written import written
from tpcompiler.verify.compare import compare
from tpcompiler.verify_files import verify_artifact

pytestmark = pytest.mark.slow


def choose(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.both(x)
    return torch.cond(y.sum() > 0, lambda y: self.side(y) * 2, lambda y: -y, (y,))


def choose_twice(self: Any, x: torch.Tensor) -> torch.Tensor:
    def inner(y: torch.Tensor) -> torch.Tensor:
        return torch.cond(y.mean() > 0.1, lambda y: y + 1, lambda y: self.side(y), (y,))

    return torch.cond(x.sum() > 0, inner, lambda y: -y, (self.both(x),))


def choose_of_a_cut_value(self: Any, x: torch.Tensor) -> torch.Tensor:
    h = self.up(x)
    return self.down(torch.cond(x.sum() > 0, lambda h: h.cumsum(-1), lambda h: h.sin(), (h,)))


def repeat(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.both(while_loop(lambda i, _: i < 3, lambda i, x: (i + 1, self.side(x)), (torch.tensor(0), x))[1])


def accumulate(self: Any, x: torch.Tensor) -> torch.Tensor:
    return scan(lambda carry, x: (carry + self.side(x), carry * x), torch.zeros(8), self.both(x))[1]


def by_row(self: Any, x: torch.Tensor) -> torch.Tensor:
    return map_rows(lambda row: self.side(row) * 2, self.both(x))


def running_sum(self: Any, x: torch.Tensor) -> torch.Tensor:
    return associative_scan(lambda a, b: a + b, self.both(x), 0, combine_mode="generic")


def noise_in_a_branch(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.both(x)
    return torch.cond(x.sum() > 0, lambda y: y + torch.rand_like(y), lambda y: F.dropout(y, 0.5, True), (y,))


FUNCTIONS = [choose, choose_twice, choose_of_a_cut_value, repeat, accumulate, by_row, running_sum, noise_in_a_branch]


def program_of(function: Callable[..., Any], x: torch.Tensor = X, **options: Any) -> ExportedProgram:
    return exported(Net(function, side=nn.Linear(8, 8)), x, **options)


@pytest.mark.sweep(5)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_rank_runs_the_whole_body(function: Callable[..., Any], world: int, tmp_path: Path) -> None:
    program = program_of(function)
    made = tpcompiler.parallelize(program, world, PLAN)
    made.save(tmp_path / "out")
    for given in (X.abs(), -X.abs()):  # both branches
        report = made.verify((given,))
        assert report.ok, report
        assert report.outputs[0].tolerance < 1e-4
    assert verify_artifact(tmp_path / "out", program, (X,)).ok
    graph = made.rank_program(world - 1).graph_module
    inside = [part.graph for name, part in graph.named_modules() if name and hasattr(part, "graph")]
    assert bool(inside) == (function is not running_sum)  # torch writes an associative scan out
    assert not any(edit.is_collective(node) for body in inside for node in body.nodes)


def test_a_cut_operand_is_gathered_and_said() -> None:
    made = tpcompiler.parallelize(program_of(choose_of_a_cut_value), 2, PLAN)
    (gather,) = [c for c in made.collectives() if c.why == "fallback"]
    assert (gather.kind, gather.payload_bytes, gather.reason) == (
        "all_gather",
        4 * 16 * 4,
        "its bodies run whole on every rank",
    )


@pytest.mark.parametrize("function", [repeat, accumulate, by_row])
def test_a_planned_weight_in_a_body(function: Callable[..., Any]) -> None:
    said = refusal(program_of(function), {**PLAN, "side.weight": "S(0)"})
    assert said.startswith("ShardingError: cannot shard 'side.weight' on dim 0 of 8 by mesh axis 'tp' of 2 for ")
    assert "its bodies run whole on every rank" in said
    assert "pin 'side.weight' to R (" in said


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


def calls_cond(made: tpcompiler.ParallelProgram) -> bool:
    return any(has_bodies(node) for node in all_calls(made.resharded.graph))


@pytest.mark.sweep(6)
@pytest.mark.parametrize("is_dynamic", [False, True])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("style", STYLES, ids=str)
@pytest.mark.parametrize("function", PLANNED)
def test_a_planned_weight_in_a_branch(
    function: Callable[..., Any], style: dict[str, str], world: int, is_dynamic: bool, tmp_path: Path
) -> None:
    shapes = {"dynamic_shapes": (((Dim("batch", min=2, max=64), None),),)} if is_dynamic else {}
    program = program_of(function, **shapes)
    made = tpcompiler.parallelize(program, world, {**PLAN, **style})
    assert not calls_cond(made)
    made.save(tmp_path / "out")  # it is checked
    for given in (X.abs(), -X.abs(), X):
        assert made.verify((given,)).ok
    assert verify_artifact(tmp_path / "out", program, (-X.abs(),)).ok
    assert [c for c in made.collectives() if c.why == "fallback"] == []
    weight = dict(made.rank_program(0).state_dict)["side.weight"]
    assert weight.numel() == 64 // world


def test_both_branches_are_reported() -> None:
    made = tpcompiler.parallelize(program_of(choose), 2, {**PLAN, "side": "colwise"})
    title = "conds of which both branches are computed:"
    assert f"{title}\n  'cond' at models.py:35, in forward: 2 + 1 ops, as the plan cuts 'side.weight'" in made.report()


@pytest.mark.parametrize(("plan", "world"), [(PLAN, 2), ({**PLAN, "side": "R"}, 2), ({"**": "auto"}, 2), (PLAN, 1)])
def test_a_cond_without_a_cut_weight_stays_whole(plan: dict[str, str], world: int) -> None:
    made = tpcompiler.parallelize(program_of(choose), world, plan)
    assert calls_cond(made)
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


def look_up_clamped(self: Any, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return look_up(self, x, ids.clamp(0, 4))


def look_up_outside_too(self: Any, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return look_up(self, x + F.embedding(ids, self.table), ids)


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
    for style in ("colwise", "rowwise"):
        said = refusal(program, {**PLAN, "side": style})
        assert said.startswith("PlanError: ")
        assert f"cond has no rule for its use of 'side.weight', and runs whole on every rank, {why}" in said
    said = refusal(program, {**PLAN, "side.weight": "S(0)"})
    assert f"for cond: its bodies run whole on every rank, {why}" in said
    assert tpcompiler.parallelize(program, 2, PLAN).verify((X.abs(), IDS + 1)).ok


@pytest.mark.parametrize("function", [look_up_clamped, look_up_outside_too])
def test_positions_that_are_in_range_in_any_case(function: Callable[..., Any], tmp_path: Path) -> None:
    net = Net(function, side=nn.Linear(8, 8), table=torch.randn(5, 8))
    made = tpcompiler.parallelize(exported(net, X, IDS), 2, {**PLAN, "side": "colwise", "table": "S(0)"})
    assert not calls_cond(made)
    made.save(tmp_path / "out")
    for given in (X.abs(), -X.abs()):
        assert made.verify((given, IDS if function is look_up_outside_too else IDS + 90)).ok


def test_torch_exports_no_branch_that_writes() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        def count(y: torch.Tensor) -> torch.Tensor:
            self.count.add_(1.0)
            return self.side(y)

        return torch.cond(x.sum() > 0, count, lambda y: -y, (self.both(x),))

    with pytest.raises(Exception, match="input mutation"):
        exported(Net(forward, side=nn.Linear(8, 8), count=torch.zeros(1)), X)


def choose_rarely(self: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 1e9, lambda y: self.side(y).sin(), lambda y: self.side(y) * 2, (self.both(x),))


def choose_another_rarely(self: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 1e9, lambda y: self.side(y).cos(), lambda y: self.side(y) * 2, (self.both(x),))


def test_check_compares_the_branch_that_no_input_chooses(tmp_path: Path) -> None:
    """Negative control: the ranks are those of another model in a branch that no random values choose."""
    program = program_of(choose_rarely)
    made = tpcompiler.parallelize(program, 2, {**PLAN, "side": "colwise"})
    made.save(tmp_path / "out")
    manifest = read_manifest(tmp_path / "out")
    ranks = [written(made.rank_program(rank)) for rank in range(2)]
    assert check_programs(ranks, manifest, model=canonicalize(program)).findings == []
    other = canonicalize(program_of(choose_another_rarely))
    (finding,) = check_programs(ranks, manifest, model=other).findings
    assert "on random values they differ by" in finding


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
    assert not compare(made.original, programs, (X,), {}, made.layout(), ["x_0"], ["output"]).ok


def test_both_branches_of_one_that_draws_are_a_finding(tmp_path: Path) -> None:
    """Negative control: the compiler is made to believe that a branch which draws may run in any case."""
    program = exported(Net(draw, side=nn.Linear(8, 8)), X, IDS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tpcompiler.passes.flatten_branches.obstacle", lambda nodes, at_door: "")
        made = tpcompiler.parallelize(program, 2, {**PLAN, "side.weight": "S(0)"})
    with pytest.raises(InternalError, match="the ranks compute both branches of 'cond', and one of them draws"):
        made.save(tmp_path / "out")


@pytest.mark.sweep(4)
@pytest.mark.parametrize("function", [choose, choose_twice, accumulate, by_row])
def test_dynamic_sizes(function: Callable[..., Any], tmp_path: Path) -> None:
    program = program_of(function, dynamic_shapes=(((Dim("batch", min=4, max=64), None),),))
    for boundary in ({}, {"inputs": ["S(0)"], "outputs": ["S(0)"]}):
        made = tpcompiler.parallelize(program, 2, PLAN, **boundary)
        made.save(tmp_path / f"out{len(boundary)}")
        for rows in (4, 6):
            x = torch.randn(rows, 8)
            assert made.verify((x,)).ok
            assert verify_artifact(tmp_path / f"out{len(boundary)}", program, (x,)).ok


def test_sizes_in_a_body_are_those_around_it() -> None:
    """A size that is cut has another symbol, and a body must not name the old one."""
    program = program_of(choose_twice, dynamic_shapes=(((Dim("batch", min=4, max=64), None),),))
    made = tpcompiler.parallelize(program, 2, PLAN, inputs=["S(0)"], outputs=["S(0)"]).rank_program(0)
    inside = {n.meta["val"] for part in made.graph_module.children() for n in part.graph.nodes if "val" in n.meta}
    symbols = symbols_of(inside)
    assert len(symbols) == 1
    assert symbols <= made.range_constraints.keys()


def test_half_precision() -> None:
    program = exported(Net(choose, side=nn.Linear(8, 8)).to(torch.bfloat16), X.bfloat16())
    report = tpcompiler.parallelize(program, 2, PLAN).verify((X.bfloat16(),))
    assert report.ok
    assert report.outputs[1].tolerance < 1e-4  # of the comparison in float32


def test_a_wrong_body_is_seen() -> None:
    """Negative control: a branch of one rank does something else."""
    made = tpcompiler.parallelize(program_of(by_row), 2, PLAN)
    programs = [made.rank_program(rank) for rank in range(2)]
    body = programs[1].graph_module.get_submodule("body_graph_0")
    (product,) = [node for node in body.graph.nodes if node.target is torch.ops.aten.mul.Tensor]
    product.update_arg(1, 3)
    body.recompile()
    report = compare(made.original, programs, (X,), {}, made.layout(), ["x_0"], ["output"])
    assert not report.ok
    again = [made.rank_program(rank) for rank in range(2)]  # the ranks' bodies are their own
    assert compare(made.original, again, (X,), {}, made.layout(), ["x_0"], ["output"]).ok


def test_bodies_are_named_for_the_other_device() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x + torch.ones(8), lambda x: -x, (self.both(x),))

    made = tpcompiler.parallelize(program_of(forward), 2, PLAN, device_type="cuda")
    graph = made.rank_program(0).graph_module
    (ones,) = [n for m in graph.modules() for n in getattr(m, "graph", graph.graph).nodes if "full" in str(n.target)]
    assert ones.kwargs["device"] == torch.device("cuda")
    assert made.verify((X,)).ok


def test_in_real_processes(tmp_path: Path) -> None:
    program = program_of(choose_twice)
    tpcompiler.parallelize(program, 2, PLAN).save(tmp_path / "out")
    calls = [(X,), (X.abs(),), (-X.abs(),)]
    for own in called([calls, calls], tmp_path):
        for got, given in zip(own, calls, strict=True):
            torch.testing.assert_close(got, program.module()(*given), rtol=1e-4, atol=1e-5)


def flex(self: Any, x: torch.Tensor) -> torch.Tensor:
    heads = self.up(x).unflatten(-1, (4, 4)).transpose(0, 1)[None]
    by_distance = flex_attention(heads, heads, heads, score_mod=lambda s, b, h, q, k: s + self.bias[h] * (q - k))
    causal = create_block_mask(lambda b, h, q, k: q >= k, None, None, 4, 4, device="cpu")
    mixed = by_distance + flex_attention(heads, heads, heads, block_mask=causal)
    return self.down(mixed[0].transpose(0, 1).flatten(1))


def test_flex_attention_runs_whole_and_is_not_written(tmp_path: Path) -> None:
    """In memory only: torch.export.save does not take it."""
    program = exported(Net(flex, bias=torch.tensor([0.1, 0.2, 0.3, 0.4])).requires_grad_(False), X)
    for world in (2, 4):
        made = tpcompiler.parallelize(program, world, PLAN)
        assert made.verify((X,)).ok
        assert [c.kind for c in made.collectives() if c.why == "fallback"] == ["all_gather"]
        assert sum(has_bodies(node) for node in all_calls(made.resharded.graph)) == 2
    with pytest.raises(UnsupportedError) as raised:
        made.save(tmp_path / "out")
    assert str(raised.value).startswith(
        "the program cannot be written: torch.export.save does not take 'flex_attention'\n"
        "  help: run rank_program(rank) in the process that makes it, or export with scaled_dot_product_attention\n"
    )
    assert not (tmp_path / "out").exists()


def wrapped(self: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        h = self.up(x)
        with torch.enable_grad(), torch.autocast("cpu", torch.bfloat16, enabled=False):
            h = torch.relu(h)
            with torch.no_grad():
                h = h * 2
    return self.down(h)


def half_inside(self: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        return self.down(torch.relu(self.up(x)))


@pytest.mark.parametrize("function", [wrapped, half_inside])
def test_switches_of_gradients_and_autocast_are_written_out(function: Callable[..., Any]) -> None:
    made = tpcompiler.parallelize(exported(Net(function), X), 2, PLAN)
    assert [c.kind for c in made.collectives()] == ["all_reduce"]
    assert not any(node.op == "get_attr" for node in made.resharded.graph.nodes)
    assert made.verify((X,)).ok
