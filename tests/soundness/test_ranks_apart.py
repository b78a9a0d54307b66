"""Ranks each of which does a share of something, but not of the same: what one takes is cut otherwise than on another."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.export import ExportedProgram, export

import tpcompiler
from tests.trust.damage import Artifact, claim
from tpcompiler.judge.compare.simulate import simulate
from tpcompiler.judge.sound.check import check_programs

aten = torch.ops.aten
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Two(nn.Module):
    """Two row-wise layers, whose results are used reduced."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (
            nn.Linear(*sizes, bias=False) for sizes in ((8, 12), (8, 12), (12, 8), (12, 8))
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h, g = self.c(torch.relu(self.a(x))), self.d(torch.relu(self.b(x)))
        return h.sigmoid(), g.sigmoid(), h.relu(), h * g


@pytest.fixture(scope="module")
def two() -> Artifact:
    torch.manual_seed(0)
    plan = {"a": "colwise", "b": "colwise", "c": "rowwise", "d": "rowwise"}
    return Artifact.of(tpcompiler.parallelize(export(Two(), (X,)), 2, plan))


def node(program: ExportedProgram, target: Any, at: int = -1) -> fx.Node:
    return [node for node in program.graph.nodes if node.target is target][at]


def another_change(program: ExportedProgram, value: fx.Node, like: fx.Node) -> fx.Node:
    """A second all_reduce, of this value, as the one that ends at `like`."""
    start = like.args[0]
    assert isinstance(start, fx.Node)
    with program.graph.inserting_after(max(value, like)):
        again = program.graph.call_function(start.target, (value, *start.args[1:]))  # type: ignore[arg-type]
    with program.graph.inserting_after(again):
        wait = program.graph.call_function(like.target, (again,))  # type: ignore[arg-type]
    for new, old in ((again, start), (wait, like)):
        new.meta = {**old.meta, "custom": copy.deepcopy(old.meta["custom"])}
        claim(new)["reshard"] = "reshard_9"
    return wait


def reduced_again(artifact: Artifact, apart: bool) -> None:
    """What relu takes is reduced by a change of its own; on rank 1, apart, of what has been reduced already."""
    for rank, program in enumerate(artifact.ranks):
        relu = node(program, aten.relu.default)
        (whole,) = relu.args
        assert isinstance(whole, fx.Node)
        pending = whole.args[0].args[0]  # type: ignore[union-attr]
        takes = whole if apart and rank else pending
        wait = another_change(program, takes, whole)  # type: ignore[arg-type]
        if takes is whole:
            for part in (wait, wait.args[0]):
                claim(part)["change"] = "R -> R"  # type: ignore[arg-type]
        relu.replace_input_with(whole, wait)
    artifact.manifest.collectives.append(copy.deepcopy(artifact.manifest.collectives[0]))


def product_of_pending(artifact: Artifact, apart: bool) -> None:
    """A product with one operand pending, reduced afterwards; on rank 1, apart, with the other one pending."""
    for rank, program in enumerate(artifact.ranks):
        mul = node(program, aten.mul.Tensor)
        h, g = mul.args
        assert isinstance(h, fx.Node)
        assert isinstance(g, fx.Node)
        pending = [value.args[0].args[0] for value in (h, g)]  # type: ignore[union-attr]
        mul.args = (h, pending[1]) if apart and rank else (pending[0], g)
        claim(mul)["sharding"] = ["P(sum)"]
        wait = another_change(program, mul, h)
        values = list(program.graph.output_node().args[0])  # type: ignore[arg-type]
        program.graph.output_node().args = ((*values[:3], wait),)
        program.graph_signature.output_specs[3].arg.name = wait.name
    artifact.manifest.collectives.append(copy.deepcopy(artifact.manifest.collectives[0]))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (
            reduced_again,
            "ranks 0 and 1 take 'linear_1' for 'linear_1' as P(sum) by the op, and as R",
        ),
        (product_of_pending, "ranks 0 and 1 take 'linear_1' for 'mul' as P(sum) by the op, and as R"),
    ],
)
def test_operands_that_are_cut_otherwise(damage: Callable[[Artifact, bool], None], said: str, two: Artifact) -> None:
    right, wrong = two.copied(), two.copied()
    damage(right, False)
    damage(wrong, True)
    assert check(right) == []
    (finding,) = check(wrong)
    assert finding == said
    results = [[result.outputs for result in simulate(each.ranks, [[X]] * 2)] for each in (two, right, wrong)]
    for intact, other, damaged in zip(*(outputs[0] for outputs in results), strict=True):
        torch.testing.assert_close(intact, other)
        assert damaged.shape == intact.shape
    assert not all(map(torch.allclose, results[0][0], results[2][0]))


def check(artifact: Artifact) -> list[str]:
    for program in artifact.ranks:
        program.graph.lint()
    return check_programs(artifact.written(), artifact.manifest).findings


def test_a_call_of_python_is_a_share_of_nothing_else(two: Artifact) -> None:
    artifact = two.copied()
    mul = node(artifact.last, aten.mul.Tensor)
    args = [{"node": used.name} for used in mul.all_input_nodes]
    claim(mul)["call"] = {"op": "aten::mul.Tensor", "args": args, "kwargs": {}}
    mul.target = operator.sub
    (finding,) = check(artifact)
    assert "calls <built-in function sub>, and claims to be a share of another call" in finding
