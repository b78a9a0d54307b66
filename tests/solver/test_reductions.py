"""Pending sums are reduced where that is cheapest: before an op, or after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

import tpcompiler
from tests.passes.stages import Call, placed
from tpcompiler.ir.text import program_text

X = torch.randn(4, 8)
A = {"**.a": "rowwise_split_input"}
ROWS = {**A, "**.b": "rowwise_split_input"}


def two(forward: Callable[..., torch.Tensor]) -> Call:
    """Two layers whose results are pending sums of [4, 6]."""
    return Call(
        forward, a=nn.Linear(8, 6, bias=False), b=nn.Linear(8, 6, bias=False), small=nn.Linear(6, 2, bias=False)
    )


def kinds(module: nn.Module, args: tuple[Any, ...], plan: dict[str, str], world: int = 2) -> list[str]:
    made = tpcompiler.parallelize(torch.export.export(module, args), world, plan)
    assert made.verify(args).ok
    return [c.kind for c in made.collectives()]


def test_branches_that_are_added_share_a_reduction() -> None:
    module = two(lambda self, x: self.a(x) + self.b(x))
    text = program_text(placed(module, (X,), ROWS))
    assert_expected_inline(
        text[text.index("x: ") :],
        """\
x: R = input f32[4, 8]
reshard: S(1) = reshard(x)
linear: P(sum) = linear(reshard, p_a_weight)
reshard_1: S(1) = reshard(x)
linear_1: P(sum) = linear(reshard_1, p_b_weight)
add: P(sum) = add(linear, linear_1)
reshard_2: R = reshard(add)
return reshard_2
""",
    )


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    ("forward", "count", "plan"),
    {
        "a sum": (lambda self, x: self.a(x) + self.b(x), 1, ROWS),
        "a sum of a number's multiple": (lambda self, x: torch.add(self.a(x), self.b(x), alpha=3), 1, ROWS),
        "a difference": (lambda self, x: self.a(x) - self.b(x), 1, ROWS),
        "a sum twice over": (lambda self, x: (self.a(x) + self.b(x)) + self.a(x * 2), 1, ROWS),
        "with itself": (lambda self, x: (y := self.a(x)) + y, 1, A),
        "a smaller product": (lambda self, x: self.small(self.a(x)), 1, A),
        "a sum over rows": (lambda self, x: self.a(x).sum(0), 1, A),
        "a product of sums": (lambda self, x: self.a(x) * self.b(x), 2, ROWS),
        "no linear op": (lambda self, x: (self.a(x)).relu() + self.b(x), 2, ROWS),
        "needed elsewhere": (lambda self, x: (y := self.a(x)) + self.b(x) + y.relu(), 2, ROWS),
        "one that is whole": (lambda self, x: self.a(x) + x[:, :6], 1, A),
    }.values(),
)
def test_equal_at_that_many_collectives(
    forward: Callable[..., torch.Tensor], count: int, plan: dict[str, str], world: int
) -> None:
    assert kinds(two(forward), (X,), plan, world) == ["all_reduce"] * count


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32])
def test_integers_that_wrap_are_summed_up_first(dtype: torch.dtype) -> None:
    """A sum over rows is of 64 bits: shares that wrap in fewer would not add up to a total that wraps."""
    largest = torch.iinfo(dtype).max
    args = (torch.randint(largest // 2, largest, (64, 8), dtype=dtype), torch.randint(1, 100, (8, 4), dtype=dtype))
    exported = torch.export.export(Call(lambda self, a, b: (a @ b).sum(0)), args)
    made = tpcompiler.parallelize(exported, 2, {}, inputs=["S(1)", "S(0)"], outputs=["R"])
    assert [c.kind for c in made.collectives()] == ["all_reduce"]
    report = made.verify(args)
    assert report.ok, report


@pytest.mark.slow
@pytest.mark.parametrize(
    ("forward", "dtype", "payload"),
    [
        (lambda self, a, b: (a @ b).real, torch.complex64, 4 * 6 * 4),
        (lambda self, a, b: (a @ b).sum(0, dtype=torch.float32), torch.bfloat16, 6 * 4),
    ],
    ids=["complex", "narrow"],
)
def test_floats_are_summed_up_in_another_dtype(forward: Any, dtype: torch.dtype, payload: int) -> None:
    """Pending floats pass into what has fewer bytes: their shares do not wrap."""
    args = torch.randn(4, 8, dtype=dtype), torch.randn(8, 6, dtype=dtype)
    made = tpcompiler.parallelize(
        torch.export.export(Call(forward), args), 2, {}, inputs=["S(1)", "S(0)"], outputs=["R"]
    )
    assert [(c.kind, c.payload_bytes) for c in made.collectives()] == [("all_reduce", payload)]
    report = made.verify(args)
    assert report.ok, report
