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
from tests.compared import compare
from tests.passes.stages import Call
from tpcompiler._torch import symbols_of
from tpcompiler.errors import UnsupportedError
from tpcompiler.ir import edit
from tpcompiler.ir.control_flow import all_calls, has_bodies
from tpcompiler.parallel.program_subject import layout_of


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


@pytest.mark.slow
@pytest.mark.sweep(5)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_rank_runs_the_whole_body(function: Callable[..., Any], world: int, tmp_path: Path) -> None:
    program = program_of(function)
    made = tpcompiler.parallelize(program, world, PLAN)
    made.save(tmp_path / "out")
    both = [(-X.abs(),), (X,)]  # branches
    report = tpcompiler.open(tmp_path / "out").verify((X.abs(),), original=program, then=both)
    assert report.ok, report
    assert all(each.tolerance < 1e-4 for each in report.outputs)
    graph = made.rank_program(world - 1).graph_module
    inside = [part.graph for name, part in graph.named_modules() if name and hasattr(part, "graph")]
    assert bool(inside) == (function is not running_sum)  # torch writes an associative scan out
    assert not any(edit.is_collective(node) for body in inside for node in body.nodes)


@pytest.mark.sample(1)
@pytest.mark.parametrize("function", [repeat, accumulate, by_row])
def test_a_planned_weight_in_a_body(function: Callable[..., Any]) -> None:
    said = refusal(program_of(function), {**PLAN, "side.weight": "S(0)"})
    assert said.startswith("ShardingError: cannot shard 'side.weight' on dim 0 of 8 by mesh axis 'tp' of 2 for ")
    assert "its bodies run whole on every rank" in said
    assert "pin 'side.weight' to R (" in said


@pytest.mark.slow
@pytest.mark.sweep(4)
@pytest.mark.parametrize("function", [choose, choose_twice, accumulate, by_row])
def test_dynamic_sizes(function: Callable[..., Any], tmp_path: Path) -> None:
    program = program_of(function, dynamic_shapes=(((Dim("batch", min=4, max=64), None),),))
    for boundary in ({}, {"inputs": ["S(0)"], "outputs": ["S(0)"]}):
        made = tpcompiler.parallelize(program, 2, PLAN, **boundary)
        made.save(tmp_path / f"out{len(boundary)}")
        calls = [(torch.randn(rows, 8),) for rows in (4, 6)]
        assert tpcompiler.open(tmp_path / f"out{len(boundary)}").verify(calls[0], original=program, then=calls[1:]).ok


@pytest.mark.slow
def test_sizes_in_a_body_are_those_around_it() -> None:
    """A size that is cut has another symbol, and a body must not name the old one."""
    program = program_of(choose_twice, dynamic_shapes=(((Dim("batch", min=4, max=64), None),),))
    made = tpcompiler.parallelize(program, 2, PLAN, inputs=["S(0)"], outputs=["S(0)"]).rank_program(0)
    inside = {n.meta["val"] for part in made.graph_module.children() for n in part.graph.nodes if "val" in n.meta}
    symbols = symbols_of(inside)
    assert len(symbols) == 1
    assert symbols <= made.range_constraints.keys()


@pytest.mark.slow
def test_a_wrong_body_is_seen() -> None:
    """Negative control: a branch of one rank does something else."""
    made = tpcompiler.parallelize(program_of(by_row), 2, PLAN)
    programs = [made.rank_program(rank) for rank in range(2)]
    body = programs[1].graph_module.get_submodule("body_graph_0")
    (product,) = [node for node in body.graph.nodes if node.target is torch.ops.aten.mul.Tensor]
    product.update_arg(1, 3)
    body.recompile()
    report = compare(made.only.original(), programs, (X,), {}, layout_of(made.only), ["x_0"], ["output"])
    assert not report.ok
    again = [made.rank_program(rank) for rank in range(2)]  # the ranks' bodies are their own
    assert compare(made.only.original(), again, (X,), {}, layout_of(made.only), ["x_0"], ["output"]).ok


def test_bodies_are_named_for_the_other_device() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x + torch.ones(8), lambda x: -x, (self.both(x),))

    made = tpcompiler.parallelize(program_of(forward), 2, PLAN, device_type="cuda")
    graph = made.rank_program(0).graph_module
    (ones,) = [n for m in graph.modules() for n in getattr(m, "graph", graph.graph).nodes if "full" in str(n.target)]
    assert ones.kwargs["device"] == torch.device("cuda")
    assert made.verify((X,)).ok


def flex(self: Any, x: torch.Tensor) -> torch.Tensor:
    heads = self.up(x).unflatten(-1, (4, 4)).transpose(0, 1)[None]
    by_distance = flex_attention(heads, heads, heads, score_mod=lambda s, b, h, q, k: s + self.bias[h] * (q - k))
    causal = create_block_mask(lambda b, h, q, k: q >= k, None, None, 4, 4, device="cpu")
    mixed = by_distance + flex_attention(heads, heads, heads, block_mask=causal)
    return self.down(mixed[0].transpose(0, 1).flatten(1))


@pytest.mark.slow
def test_flex_attention_runs_whole_and_is_not_written(tmp_path: Path) -> None:
    """In memory only: torch.export.save does not take it."""
    program = exported(Net(flex, bias=torch.tensor([0.1, 0.2, 0.3, 0.4])).requires_grad_(False), X)
    for world in (2, 4):
        made = tpcompiler.parallelize(program, world, PLAN)
        assert made.verify((X,)).ok
        assert [c.kind for c in made.collectives() if c.why == "fallback"] == ["all_gather"]
        assert sum(has_bodies(node) for node in all_calls(made.converted.resharded.graph)) == 2
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


@pytest.mark.sample(1)
@pytest.mark.parametrize("function", [wrapped, half_inside])
def test_switches_of_gradients_and_autocast_are_written_out(function: Callable[..., Any]) -> None:
    made = tpcompiler.parallelize(exported(Net(function), X), 2, PLAN)
    assert [c.kind for c in made.collectives()] == ["all_reduce"]
    assert not any(node.op == "get_attr" for node in made.converted.resharded.graph.nodes)
    assert made.verify((X,)).ok


def _rows(x: torch.Tensor) -> torch.Tensor:
    return torch.vmap(lambda row: row.cumsum(0) * row.sum())(x)


def _recurrence(x: torch.Tensor) -> torch.Tensor:
    decay = torch.exp(-x[..., None] * torch.ones(4))
    # "generic", as opposed to "pointwise", is exported as the calls of torch.vmap
    return associative_scan(
        lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (decay, x[..., None] * decay), 1, combine_mode="generic"
    )[1].sum(-1)


@pytest.mark.sample(1)
@pytest.mark.parametrize("plan", [{"up": "colwise", "down": "rowwise"}, {}], ids=["planned", "whole"])
@pytest.mark.parametrize("function", [_rows, _recurrence])
def test_mapped_functions_are_written_in_the_ops_of_all_rows(
    function: Callable[..., Any], plan: dict[str, str], tmp_path: Path
) -> None:
    module = Call(lambda self, x: self.down(function(self.up(x))), up=nn.Linear(4, 6), down=nn.Linear(6, 4))
    program = tpcompiler.parallelize(torch.export.export(module, (x := torch.randn(2, 5, 4),)), {"tp": 2}, plan)
    assert program.verify((x,)).ok
    program.save(tmp_path / "out")
