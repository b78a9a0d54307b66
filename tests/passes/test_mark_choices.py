"""What is chosen where an op has several ways: pending sums, gathers, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline

from tests.passes.models import Mlp
from tests.passes.stages import Call, placed
from tpcompiler.errors import ShardingError
from tpcompiler.ir.text import program_text

X, Y = torch.randn(2, 4), torch.randn(2, 4)


def text(*args: Any, **kwargs: Any) -> str:
    return program_text(placed(*args, **kwargs))


def test_a_pending_sum_is_reduced_right_after_its_op() -> None:
    """Only a pass of its own may delay that. The whole `mul` becomes pending again at no cost."""
    module = Call(lambda self, x, y: (x + y * 2).neg().view(8).sum() / 3)
    assert_expected_inline(
        text(module, (X, Y), inputs=["P(sum)", "P(sum)"]),
        """\
x: P(sum) = input f32[2, 4]
y: P(sum) = input f32[2, 4]
mul: P(sum) = mul(y, 2)
add: P(sum) = add(x, mul)
neg: P(sum) = neg(add)
view: P(sum) = view(neg, [8])
sum_1: P(sum) = sum(view)
reshard: R = reshard(sum_1)
div: R = div(reshard, 3)
return div
""",
    )


def test_the_cheaper_operand_moves() -> None:
    """The large operand stays, the small one is sent; a pending sum is scattered rather than reduced everywhere."""
    big, small = torch.randn(2, 8, 16), torch.randn(8, 16)
    module = Call(lambda self, x, y: x + y)
    assert_expected_inline(
        text(module, (big, small), inputs=["S(1)", "S(1)"]),
        """\
x: S(1) = input f32[2, 8, 16]
y: S(1) = input f32[8, 16]
reshard: S(0) = reshard(y)
add: S(1) = add(x, reshard)
reshard_1: R = reshard(add)
return reshard_1
""",
    )
    assert_expected_inline(
        text(module, (small, small + 1), inputs=["P(sum)", "S(1)"]),
        """\
x: P(sum) = input f32[8, 16]
y: S(1) = input f32[8, 16]
reshard: S(1) = reshard(x)
add: S(1) = add(reshard, y)
reshard_1: R = reshard(add)
return reshard_1
""",
    )


def error(*args: Any, **kwargs: Any) -> str:
    with pytest.raises(ShardingError) as caught:
        placed(*args, **kwargs)
    return "\n".join(line.split("      used at")[0] for line in str(caught.value).splitlines())


def test_a_planned_weight_is_never_gathered() -> None:
    module = Call(lambda self, x: x + self.w.sort()[0], w=(4,))
    assert_expected_inline(
        error(module, (X,), {"w": "S(0)"}),
        """\
cannot shard 'w' on dim 0 of 4 by mesh axis 'tp' of 2 for aten.sort.default: it needs the dim of 4 whole
  help: pin 'w' to R in the plan
  asked by: the plan ("w": "S(0)")""",
    )


def test_a_weight_that_would_be_cut_through_its_heads() -> None:
    module = Call(lambda self, x: x + self.w.view(3, 4)[0], w=(12,))
    assert_expected_inline(
        error(module, (X,), {"w": "S(0)"}),
        """\
cannot shard 'w' on dim 0 of 12 by mesh axis 'tp' of 2 for aten.view.default: dim 0 splits into 3 x 4, and 3 is not divisible by 2 (it is by 3; padded to 4 it would be 1.33 times as large)
  help: pin 'w' to R in the plan
  asked by: the plan ("w": "S(0)")""",
    )


def test_weights_that_are_cut_against_each_other() -> None:
    module = Call(lambda self, x: F.linear(x, self.w, self.b), w=(6, 4), b=(6,))
    assert_expected_inline(
        error(module, (X,), {"w": "S(1)", "b": "S(0)"}),
        """\
cannot shard 'w' on dim 1 of 4 by mesh axis 'tp' of 2 for aten.linear.default: other operands are cut differently
  help: pin 'w' to R in the plan
  asked by: the plan ("w": "S(1)")""",
    )


def test_an_error_names_the_line() -> None:
    with pytest.raises(ShardingError, match=r"used at: models\.py:\d+, in forward"):
        placed(Mlp(), (X,), {"up.weight": "S(1)", "up.bias": "S(0)"})
