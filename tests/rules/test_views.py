"""The one algorithm behind all reshapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.export import Dim, export

import tpcompiler.rules  # noqa: F401  (registers the rules)
from tests.rules.sample import call, node_of
from tpcompiler.judge.rules.run_on_shards import check, rule_from
from tpcompiler.rules.notation import RuleText, parse
from tpcompiler.rules.registry import rule_of
from tpcompiler.rules.views import dim_groups

aten = torch.ops.aten

TABLE = {
    "nothing changes": ([2, 3], [2, 3], "f0 f1 -> f0 f1"),
    "a split": ([2, 12], [2, 3, 4], "f0 (f1 f2) -> f0 f1 f2"),
    "a split in three": ([24], [2, 3, 4], "(f0 f1 f2) -> f0 f1 f2"),
    "a merge": ([2, 3, 4], [2, 12], "f0 f1 f2 -> f0 (f1 f2)"),
    "a merge of all": ([2, 3, 4], [24], "f0 f1 f2 -> (f0 f1 f2)"),
    "a merge and a split": ([2, 3, 8], [6, 4, 2], "f0 f1 (f2 f3) -> (f0 f1) f2 f3"),
    "the boundary moves": ([4, 6], [2, 12], "(f0 f1) f2 -> f0 (f1 f2)"),
    "the boundary moves twice": ([4, 4, 4], [2, 8, 4], "(f0 f1) f2 f3 -> f0 (f1 f2) f3"),
    "dims of one come": ([2, 3], [1, 2, 1, 3, 1], "f0 f1 -> 1 f0 1 f1 1"),
    "dims of one go": ([1, 2, 1, 3, 1], [2, 3], "1 f0 1 f1 1 -> f0 f1"),
    "dims of one inside a merge": ([2, 1, 3], [6, 1], "f0 1 f1 -> (f0 f1) 1"),
    "nothing but one": ([1, 1], [1], "1 1 -> 1"),
    "from a 0-d tensor": ([], [1, 1], " -> 1 1"),
    "to a 0-d tensor": ([1], [], "1 -> "),
    "neither divides": ([2, 3], [3, 2], "i0! i1! -> o0! o1!"),
    "neither divides behind equal dims": ([5, 1, 4, 6], [5, 1, 6, 4], "f0 f1 i2! i3! -> f0 f1 o2! o3!"),
    "neither divides after a split": ([12, 5], [2, 5, 6], "i0! i1! -> o0! o1! o2!"),
    "nothing in it": ([0, 4], [0, 2, 2], "f0 (f1 f2) -> f0 f1 f2"),
    "nothing in it, merged": ([4, 0], [0], "f0 f1 -> (f0 f1)"),
    "nothing in it, moved": ([0, 4], [2, 0], "i0! i1! -> o0! o1!"),
}


@pytest.mark.parametrize(("source", "target", "text"), TABLE.values(), ids=TABLE)
def test_groups(source: list[int], target: list[int], text: str) -> None:
    assert dim_groups(source, target)[0] == text


class Pair(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a.sum() + b.sum()


@pytest.fixture(scope="module")
def sizes() -> tuple[Any, Any]:
    """Two symbolic sizes of one shape environment."""
    shapes = {"a": {0: Dim("m", min=2, max=64)}, "b": {0: Dim("n", min=2, max=64)}}
    program = export(Pair(), (torch.zeros(5, 2), torch.zeros(7, 2)), dynamic_shapes=shapes)
    a, b = (node for node in program.graph.nodes if node.op == "placeholder")
    return a.meta["val"].shape[0], b.meta["val"].shape[0]


SYMBOLIC = {
    "kept": ("m 12", "m 3 4", "f0 (f1 f2) -> f0 f1 f2", "m 3 4"),
    "merged": ("m n 4", "m*n 4", "f0 f1 f2 -> (f0 f1) f2", "m n 4"),
    "split": ("m*n 4", "m n 4", "(f0 f1) f2 -> f0 f1 f2", "m n 4"),
    "merged with a number": ("m 6 4", "6*m 4", "f0 f1 f2 -> (f0 f1) f2", "m 6 4"),
    "split from a number": ("6*m", "m 6", "(f0 f1) -> f0 f1", "m 6"),
    "all merged": ("2 m n", "2*m*n", "f0 f1 f2 -> (f0 f1 f2)", "2 m n"),
    "a one beside it": ("m 1 8", "1 m 2 4", "f0 1 (f1 f2) -> 1 f0 f1 f2", "m 2 4"),
    "it cannot be told": ("m n", "n m", "i0! i1! -> o0! o1!", "m n n m"),
    "cut within": ("m 4 6", "m 6 4", "f0 i1! i2! -> f0 o1! o2!", "m 4 6 6 4"),
}


@pytest.mark.parametrize(("source", "target", "text", "factors"), SYMBOLIC.values(), ids=SYMBOLIC)
def test_symbolic_groups(source: str, target: str, text: str, factors: str, sizes: tuple[Any, Any]) -> None:
    m, n = sizes
    guards = len(m.node.shape_env.guards)

    def read(words: str) -> list[Any]:
        return [eval(word, {"m": m, "n": n}) for word in words.split()]

    made, found = dim_groups(read(source), read(target))
    assert made == text
    assert [str(size) for size in found.values()] == [str(size) for size in read(factors)]
    assert len(m.node.shape_env.guards) == guards, "asking about sizes must not promise anything about them"


@st.composite
def reshapes(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Two shapes that merge the same sequence of small factors, ones strewn in."""
    factors = draw(st.lists(st.integers(2, 5), min_size=1, max_size=4))
    shapes = []
    for _ in range(2):
        shape, size = [], 1
        for factor in factors:
            size *= factor
            if draw(st.booleans()):
                shape, size = [*shape, size], 1
        shape.append(size)  # may be 1
        if draw(st.booleans()):
            shape.insert(draw(st.integers(0, len(shape))), 1)
        shapes.append(shape)
    return shapes[0], shapes[1]


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True)
@given(reshapes(), st.integers(2, 4))
def test_every_cut_of_a_reshape_is_right(shapes: tuple[Sequence[int], Sequence[int]], degree: int) -> None:
    source, target = shapes
    value = torch.arange(torch.Size(source).numel()).view(source)
    node = node_of(call(aten.view.default, value, target, text=""))
    rule = rule_of(node)
    assert rule is not None
    assert "whole" in check(node, rule, degree)


@st.composite
def symbolic_reshapes(draw: st.DrawFn) -> tuple[list[list[str]], list[list[str]]]:
    """Two shapes that merge the same sequence of symbols and numbers; a dim without any is a 1."""
    factors = draw(st.lists(st.sampled_from(["m", "n", "2", "3", "4"]), min_size=1, max_size=5))
    shapes = []
    for _ in range(2):
        shape: list[list[str]] = [[]]
        for factor in factors:
            shape[-1].append(factor)
            if draw(st.booleans()):
                shape.append([])
        shapes.append(shape)
    return shapes[0], shapes[1]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(symbolic_reshapes(), st.integers(2, 3), st.integers(2, 3))
def test_what_symbols_say_holds_for_their_numbers(
    sizes: tuple[Any, Any], shapes: tuple[list[list[str]], list[list[str]]], m: int, n: int
) -> None:
    env = sizes[0].node.shape_env
    guards = len(env.guards)
    numbers = {symbol.node.expr: number for symbol, number in zip(sizes, (m, n), strict=True)}

    def read(shape: list[list[str]], symbols: Sequence[Any]) -> list[Any]:
        known = dict(zip("mn", symbols, strict=True))
        return [math.prod([known.get(f) or int(f) for f in dim], start=1) for dim in shape]

    text, factors = dim_groups(*(read(shape, sizes) for shape in shapes))
    assert len(env.guards) == guards
    assert "!" not in text, "all of these can be told apart"
    concrete = {
        name: size if isinstance(size, int) else int(size.node.expr.subs(numbers)) for name, size in factors.items()
    }
    source, target = (read(shape, (m, n)) for shape in shapes)
    node = node_of(call(aten.view.default, torch.arange(math.prod(source)).view(source), target, text=""))
    rule = rule_from(RuleText(text, sizes={"size": parse(text).outputs[0]}, factors=concrete), node)
    assert "whole" in check(node, rule, 2)


def test_both_shapes_are_spelt_by_the_factors() -> None:
    source, target = [4, 6, 10], [2, 12, 5, 2]
    text, factors = dim_groups(source, target)
    assert text == "(f0 f1) f2 (f3 f4) -> f0 (f1 f2) f3 f4"
    assert factors == {"f0": 2, "f1": 2, "f2": 6, "f3": 5, "f4": 2}
