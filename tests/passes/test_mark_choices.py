"""What is chosen where an op has several ways: pending sums, gathers, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import nn

from tests.opaque import opaque
from tests.passes.models import Mlp
from tests.passes.stages import Call, placed
from tpcompiler.errors import ShardingError
from tpcompiler.ir.node_placement import placement_of
from tpcompiler.ir.text import program_text

X, Y = torch.randn(2, 4), torch.randn(2, 4)
IDS = torch.tensor([[1, 5, 7], [0, 2, 2]])


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


def test_sums_are_reduced_before_what_is_not_linear() -> None:
    module = Call(lambda self, x, y: (x * y, x.relu(), x + 1, x.softmax(0)))
    assert_expected_inline(
        text(module, (X, Y), inputs=["P(sum)", "P(sum)"]),
        """\
x: P(sum) = input f32[2, 4]
y: P(sum) = input f32[2, 4]
reshard: R = reshard(x)
reshard_1: R = reshard(y)
mul: R = mul(reshard, reshard_1)
reshard_2: R = reshard(x)
relu: R = relu(reshard_2)
reshard_3: R = reshard(x)
add: R = add(reshard_3, 1)
reshard_4: R = reshard(x)
softmax: R = softmax(reshard_4, 0)
return mul, relu, add, softmax
""",
    )


def test_what_an_op_cannot_keep_cut_is_gathered() -> None:
    module = Call(lambda self, x: self.up(x).softmax(-1).cumsum(0), up=nn.Linear(4, 6))
    program = placed(module, (X,), {"up": "colwise"})
    assert_expected_inline(
        program_text(program),
        """\
p_up_weight: S(0) = up.weight f32[6, 4]
p_up_bias: S(0) = up.bias f32[6]
x: R = input f32[2, 4]
linear: S(1) = linear(x, p_up_weight, p_up_bias)
reshard: R = reshard(linear)
softmax: R = softmax(reshard, -1)
cumsum: R = cumsum(softmax, 0)
return cumsum
""",
    )
    marks = {node.name: placement_of(node) for node in program.graph.nodes}
    anyway = "which is also asked for (outputs are R unless outputs= says otherwise)"
    assert marks["softmax"].reason == f"softmax: it needs the dim of 6 whole, {anyway}"
    assert marks["softmax"].why == "plan-demanded"


def test_an_op_without_a_rule_is_noted() -> None:
    module = Call(lambda self, x: opaque(self.up(x)), up=nn.Linear(4, 6))
    program = placed(module, (X,), {"up": "colwise"})
    assert_expected_inline(
        program_text(program),
        """\
p_up_weight: S(0) = up.weight f32[6, 4]
p_up_bias: S(0) = up.bias f32[6]
x: R = input f32[2, 4]
linear: S(1) = linear(x, p_up_weight, p_up_bias)
reshard: R = reshard(linear)
opaque: R = opaque(reshard)
return opaque
""",
    )
    assert [note.text for note in program.notes if note.kind == "no rule"] == [
        "tests.opaque.default at 'opaque' has no rule: 'linear' is replicated"
    ]


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
