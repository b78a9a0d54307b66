"""Numbers that look right in the example: read from data, said of an op, or constants of a call."""

from __future__ import annotations

import dataclasses
import operator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import Dim, export

import tpcompiler
from tests.trust.damage import Artifact
from tpcompiler.judge.sound.check import check_programs

aten = torch.ops.aten
END = 2**63 - 1


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, n: torch.Tensor | None = None) -> Any:
        y = self.layer(x).relu()
        return y if n is None else (y, n + 1)


class Constant(nn.Module):
    def forward(self, x: torch.Tensor, k: int) -> torch.Tensor:
        return x.cos()


class Zeros(nn.Module):
    def forward(self, n: torch.Tensor) -> torch.Tensor:
        k = n.item()
        torch._check(k >= 0)
        torch._check(k <= 4)
        return torch.zeros(k, 8)


def made(model: nn.Module, args: tuple[Any, ...], sizes: Any = None, **boundary: Any) -> Artifact:
    return Artifact.of(tpcompiler.parallelize(export(model, args, dynamic_shapes=sizes), 2, {}, **boundary))


def found(artifact: Artifact) -> list[str]:
    return check_programs(artifact.written(), artifact.manifest).findings


def test_a_slice_at_a_number_that_is_read_from_data() -> None:
    """Of one rank, and in the example it is the right one."""
    artifact = made(Halves(), (torch.randn(4, 8), torch.tensor(2)), outputs=["S(0)", None])
    assert found(artifact) == []
    graph = artifact.ranks[1].graph
    own = next(node for node in graph.nodes if node.target is aten.index_select.default)
    (given,) = (node for node in graph.nodes if node.name == "n")
    with graph.inserting_before(own):
        start = graph.call_function(aten._local_scalar_dense.default, (given,))
        end = graph.call_function(operator.add, (start, 2))
    start.meta, end.meta = {"val": 2, "custom": {}}, {"val": 4, "custom": {}}
    own.target, own.args = aten.slice.Tensor, (own.args[0], 0, start, end)
    assert "read from data" in found(artifact)[0]


def test_a_shape_that_is_right_in_the_example_alone() -> None:
    """What cannot be compared is believed only if it may be right at other sizes too."""
    sizes = ({0: 2 * Dim("half", min=1, max=64)},)
    artifact = made(Halves(), (torch.randn(4, 8),), sizes, outputs=["S(0)"])
    assert found(artifact) == []
    for program in artifact.ranks:
        graph = program.graph
        linear = next(node for node in graph.nodes if node.target is aten.linear.default)
        half = next(node for node in graph.nodes if node.target is operator.floordiv)
        x = linear.args[0]
        with graph.inserting_after(x):
            part = graph.call_function(aten.slice.Tensor, (x, 0, 2, END))
        with x.meta["val"].fake_mode:
            said = torch.empty(half.meta["val"], 8)
        claim = {"origin": "part", "sharding": ["R"], "reason": ""}
        part.meta = {**linear.meta, "val": said, "custom": {"tpcompiler": claim}}
        with graph.inserting_before(half):
            size = graph.call_function(aten.sym_size.int, (part, 0))
        size.meta = {"val": half.meta["val"], "custom": {}}
        half.replace_all_uses_with(size)
        graph.erase_node(half)
    assert "and records" in found(artifact)[0]


def test_constants_of_the_call() -> None:
    """torch refuses a call with another one: on one rank the others would wait."""
    sound = made(Constant(), (torch.randn(4, 8), 3))
    assert found(sound) == []
    artifact = sound.copied()
    next(node for node in artifact.ranks[1].graph.nodes if node.name == "k").meta["val"] = 4
    assert found(artifact)[0].endswith("is 4, and the signature says 3")
    artifact = sound.copied()
    for program in artifact.ranks:
        spec = next(spec for spec in program.graph_signature.input_specs if spec.arg.name == "k")
        spec.arg = dataclasses.replace(spec.arg, value=4)
        next(node for node in program.graph.nodes if node.name == "k").meta["val"] = 4
    assert found(artifact)[0] == "rank 0 takes the constants ['k=4'], and the manifest says ['k=3']"


def test_a_shape_of_an_input_on_one_rank() -> None:
    sizes = {"x": {0: Dim("a")}, "n": {0: Dim("b")}}
    artifact = made(Halves(), (torch.randn(4, 8), torch.randn(3)), sizes)
    assert found(artifact) == []
    x, n = (next(node for node in artifact.ranks[1].graph.nodes if node.name == name) for name in "xn")
    with x.meta["val"].fake_mode:
        n.meta["val"] = torch.empty(x.meta["val"].shape[0])
    assert found(artifact) != []


def test_assertions_that_no_rank_has(tmp_path: Path) -> None:
    """A size that the data decide may be of an op that makes zeros."""
    program = tpcompiler.parallelize(export(Zeros(), (torch.tensor(2),)), 2, {})
    program.save(tmp_path / "out")
    artifact = Artifact.of(program)
    assert found(artifact) == []
    for rank in artifact.ranks:
        for node in list(rank.graph.nodes):
            if node.target is aten._assert_scalar.default:
                rank.graph.erase_node(node)
    assert found(artifact)[0].startswith("rank 0 asserts of its inputs [], and the manifest says [")
