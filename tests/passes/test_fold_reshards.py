"""Every change of sharding is done once, and none that is undone."""

from __future__ import annotations

from typing import Any

import torch
from expecttest import assert_expected_inline
from torch import nn

from tests.passes.stages import Call, folded, placed
from tpcompiler.ir.node_placement import has_reshard, reshard_of
from tpcompiler.ir.text import program_text

X = torch.randn(4, 8)


def both(*args: Any, **kwargs: Any) -> str:
    """The program before and after, from the first reshard on."""
    texts = (program_text(stage(*args, **kwargs)) for stage in (placed, folded))
    return "---\n".join(text[text.index("x: ") :] for text in texts)


def test_equal_changes_are_shared() -> None:
    module = Call(lambda self, x: (x.softmax(0), x.cumsum(0)))
    assert_expected_inline(
        both(module, (X,), inputs=["S(0)"]),
        """\
x: S(0) = input f32[4, 8]
reshard: R = reshard(x)
softmax: R = softmax(reshard, 0)
reshard_1: R = reshard(x)
cumsum: R = cumsum(reshard_1, 0)
return softmax, cumsum
---
x: S(0) = input f32[4, 8]
reshard: R = reshard(x)
softmax: R = softmax(reshard, 0)
cumsum: R = cumsum(reshard, 0)
return softmax, cumsum
""",
    )


def test_a_change_that_is_undone_goes() -> None:
    """The plan gathers `up`'s output, which `down` wants cut as it was."""
    module = Call(
        lambda self, x: self.down(self.up(x)), up=nn.Linear(8, 6, bias=False), down=nn.Linear(6, 8, bias=False)
    )
    plan = {"up": "colwise_gather_output", "down": "rowwise"}
    assert_expected_inline(
        both(module, (X,), plan),
        """\
x: R = input f32[4, 8]
linear: S(1) = linear(x, p_up_weight)
reshard: R = reshard(linear)
reshard_1: S(1) = reshard(reshard)
linear_1: P(sum) = linear(reshard_1, p_down_weight)
reshard_2: R = reshard(linear_1)
return reshard_2
---
x: R = input f32[4, 8]
linear: S(1) = linear(x, p_up_weight)
linear_1: P(sum) = linear(linear, p_down_weight)
reshard_2: R = reshard(linear_1)
return reshard_2
""",
    )


def test_two_changes_in_a_row_are_one() -> None:
    """A sum that is reduced and cut becomes a reduce_scatter."""
    module = Call(lambda self, x: self.b(self.a(x)), a=nn.Linear(8, 6, bias=False), b=nn.Linear(6, 8, bias=False))
    assert_expected_inline(
        both(module, (X,), {"a": "rowwise", "b": "rowwise"}, inputs=["S(1)"]),
        """\
x: S(1) = input f32[4, 8]
linear: P(sum) = linear(x, p_a_weight)
reshard: S(1) = reshard(linear)
linear_1: P(sum) = linear(reshard, p_b_weight)
reshard_1: R = reshard(linear_1)
return reshard_1
---
x: S(1) = input f32[4, 8]
linear: P(sum) = linear(x, p_a_weight)
reshard: S(1) = reshard(linear)
linear_1: P(sum) = linear(reshard, p_b_weight)
reshard_1: R = reshard(linear_1)
return reshard_1
""",
    )
    program = folded(module, (X,), {"a": "rowwise", "b": "rowwise"}, inputs=["S(1)"])
    kinds = [reshard_of(node).why for node in program.graph.nodes if has_reshard(node)]
    assert kinds == ["inherent", "inherent"]


def test_a_gather_that_the_plan_asks_for_keeps_its_cause() -> None:
    """It is cut again at once, in each half."""

    def gated(self: Any, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.up(x).chunk(2, -1)
        return self.down(gate * up)

    module = Call(gated, up=nn.Linear(8, 16, bias=False), down=nn.Linear(8, 8, bias=False))
    program = folded(module, (X,), {"up": "colwise_gather_output", "down": "rowwise"})
    first = next(reshard_of(node) for node in program.graph.nodes if has_reshard(node))
    assert first.source.text(program.mesh) == "S(1)"
    assert first.target.text(program.mesh) == "S(1, block 8)"
    assert first.why == "plan-demanded"
    assert first.reason == 'the plan ("up": "colwise_gather_output")'
