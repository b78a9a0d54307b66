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


def test_a_change_that_one_user_undoes_stays_for_the_other() -> None:
    def forward(self: Any, x: torch.Tensor) -> Any:
        h = self.up(x)
        return self.down(h), h

    module = Call(forward, up=nn.Linear(8, 6, bias=False), down=nn.Linear(6, 8, bias=False))
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
return reshard_2, reshard
---
x: R = input f32[4, 8]
linear: S(1) = linear(x, p_up_weight)
reshard: R = reshard(linear)
linear_1: P(sum) = linear(linear, p_down_weight)
reshard_2: R = reshard(linear_1)
return reshard_2, reshard
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


def test_a_gather_that_is_cut_elsewhere_is_one_exchange() -> None:
    """The plan asks for R behind `a`, and for S(0) before `n`."""
    module = Call(lambda self, x: self.n(self.a(x)), a=nn.Linear(8, 6), n=nn.LayerNorm(6))
    plan = {"a": "colwise_gather_output", "n": {"inputs": ["S(0)"]}}
    assert_expected_inline(
        both(module, (X,), plan),
        """\
x: R = input f32[4, 8]
linear: S(1) = linear(x, p_a_weight, p_a_bias)
reshard: R = reshard(linear)
reshard_1: S(0) = reshard(reshard)
layer_norm: S(0) = layer_norm(reshard_1, [6], p_n_weight, p_n_bias, 1e-05, False)
reshard_2: R = reshard(layer_norm)
return reshard_2
---
x: R = input f32[4, 8]
linear: S(1) = linear(x, p_a_weight, p_a_bias)
reshard_1: S(0) = reshard(linear)
layer_norm: S(0) = layer_norm(reshard_1, [6], p_n_weight, p_n_bias, 1e-05, False)
reshard_2: R = reshard(layer_norm)
return reshard_2
""",
    )


def test_a_change_that_two_equal_ones_follow() -> None:
    """Once these are shared, it has a single user and becomes part of it."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        return self.b(h) + self.c(h)

    module = Call(forward, **{name: nn.Linear(8, 8, bias=False) for name in "abc"})
    assert_expected_inline(
        both(module, (X,), dict.fromkeys("abc", "rowwise"), inputs=["S(1)"]),
        """\
x: S(1) = input f32[4, 8]
linear: P(sum) = linear(x, p_a_weight)
reshard: S(1) = reshard(linear)
linear_1: P(sum) = linear(reshard, p_b_weight)
linear_2: P(sum) = linear(reshard, p_c_weight)
add: P(sum) = add(linear_1, linear_2)
reshard_1: R = reshard(add)
return reshard_1
---
x: S(1) = input f32[4, 8]
linear: P(sum) = linear(x, p_a_weight)
reshard: S(1) = reshard(linear)
linear_1: P(sum) = linear(reshard, p_b_weight)
linear_2: P(sum) = linear(reshard, p_c_weight)
add: P(sum) = add(linear_1, linear_2)
reshard_1: R = reshard(add)
return reshard_1
""",
    )


def test_a_gather_before_a_pending_addend() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.up(x), x, self.w)

    module = Call(forward, up=nn.Linear(8, 6, bias=False), w=(8, 6))
    plan = {"up": "colwise_gather_output", "w": "S(0)"}
    assert_expected_inline(
        both(module, (X,), plan),
        """\
x: R = input f32[4, 8]
linear: S(1) = linear(x, p_up_weight)
reshard: R = reshard(linear)
reshard_1: P(sum) = reshard(reshard)
reshard_2: S(1) = reshard(x)
addmm: P(sum) = addmm(reshard_1, reshard_2, p_w)
reshard_3: R = reshard(addmm)
return reshard_3
---
x: R = input f32[4, 8]
linear: S(1) = linear(x, p_up_weight)
reshard_1: P(sum) = reshard(linear)
reshard_2: S(1) = reshard(x)
addmm: P(sum) = addmm(reshard_1, reshard_2, p_w)
reshard_3: R = reshard(addmm)
return reshard_3
""",
    )


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
