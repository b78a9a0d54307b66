"""Whether two sizes are equal in every run, where one of them is divided."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.export import Dim, export

from tpcompiler.ir.sizes import statically_equal

Size = Callable[[Any, Any], Any]
EQUAL: list[tuple[Size, Size]] = [
    (lambda s, t: (2 * s + 1) // 4, lambda s, t: s // 2),
    (lambda s, t: s // 2 + (s + 1) // 2, lambda s, t: s),
    (lambda s, t: (s * s) // s, lambda s, t: s),
    (lambda s, t: (2 * s * t * t) // (s * t), lambda s, t: 2 * t),
    (lambda s, t: 40 // ((2 * s + 1) // 4), lambda s, t: 40 // (s // 2)),
    (lambda s, t: (s // 2) // 3, lambda s, t: s // 6),
    (lambda s, t: (4 * s + t) // 4, lambda s, t: s + t // 4),
    (lambda s, t: (2 * s + 1) // (2 * t), lambda s, t: s // t),
    (lambda s, t: (2 * s + 1) // (2 * ((2 * s + 1) // 4)), lambda s, t: s // (s // 2)),
]
UNEQUAL: list[tuple[Size, Size]] = [
    (lambda s, t: (s + 1) // 2, lambda s, t: s // 2),
    (lambda s, t: (s * s) // 2, lambda s, t: s * (s // 2)),
    (lambda s, t: (s + t) // 2, lambda s, t: s // 2 + t // 2),
    (lambda s, t: s // 2, lambda s, t: 4),
    (lambda s, t: (s + 1) // (2 * t), lambda s, t: s // (2 * t)),
    (lambda s, t: (s + 2) // 3, lambda s, t: s // 3 + 1),
]


@pytest.fixture(scope="module")
def sizes() -> list[Any]:
    """Two that are dynamic, 8 and 9 in the example."""
    program = export(torch.nn.ReLU(), (torch.randn(8, 9),), dynamic_shapes=({0: Dim.AUTO, 1: Dim.AUTO},))
    return list(next(node for node in program.graph.nodes if node.op == "placeholder").meta["val"].shape)


@pytest.mark.parametrize(("one", "other"), EQUAL)
def test_equal_for_every_remainder(one: Size, other: Size, sizes: list[Any]) -> None:
    assert all(one(s, t) == other(s, t) for s in range(2, 40) for t in range(2, 40))
    assert statically_equal(one(*sizes), other(*sizes))
    assert statically_equal(other(*sizes), one(*sizes))


@pytest.mark.parametrize(("one", "other"), UNEQUAL)
def test_equal_in_some_runs_only(one: Size, other: Size, sizes: list[Any]) -> None:
    """In the example too, some of them."""
    assert not all(one(s, t) == other(s, t) for s in range(2, 40) for t in range(2, 40))
    assert not statically_equal(one(*sizes), other(*sizes))
