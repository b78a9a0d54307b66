"""Every value gets a sharding: constraints are followed through the rules, at the fewest bytes on the wire."""

from __future__ import annotations

from typing import Any

import torch
from expecttest import assert_expected_inline
from torch import nn

from tests.passes.models import Tied
from tests.passes.stages import Call, placed
from tpcompiler.ir.text import program_text

X, Y = torch.randn(2, 4), torch.randn(2, 4)
IDS = torch.tensor([[1, 5, 7], [0, 2, 2]])


def text(*args: Any, **kwargs: Any) -> str:
    return program_text(placed(*args, **kwargs))


def test_heads_that_do_not_divide_are_dealt_whole() -> None:
    """Two heads and one: four and two features. A leaf behind a view takes such a cut too."""
    module = Call(lambda self, x: x.flatten(1) + (x + self.b.view(3, 2)).flatten(1), b=(6,))
    assert_expected_inline(
        text(module, (torch.randn(2, 3, 2),), inputs=["S(1)"]),
        """\
p_b: S(0, unit 2) = b f32[6]
x: S(1) = input f32[2, 3, 2]
view: S(1, unit 2) = view(x, [2, 6])
view_1: S(0) = view(p_b, [3, 2])
add: S(1) = add(x, view_1)
view_2: S(1, unit 2) = view(add, [2, 6])
add_1: S(1, unit 2) = add(view, view_2)
reshard: R = reshard(add_1)
return reshard
""",
    )


def test_a_leaf_takes_what_all_its_uses_want() -> None:
    """Looked up backwards through views, casts and expands: `b` is cut offline, for free."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        h = (x @ self.w).view(2, 2, 3)
        return h + self.b.view(1, 2, 3).expand(2, 2, 3) + self.c.to(torch.float32)[None]

    module = Call(forward, w=(4, 6), b=(6,), c=torch.randn(2, 3, dtype=torch.float64))
    assert_expected_inline(
        text(module, (X,), {"w": "S(1)"}),
        """\
p_w: S(1) = w f32[4, 6]
p_b: S(0) = b f32[6]
b_c: S(0) = c f64[2, 3]
x: R = input f32[2, 4]
matmul: S(1) = matmul(x, p_w)
view: S(1) = view(matmul, [2, 2, 3])
view_1: S(1) = view(p_b, [1, 2, 3])
expand: S(1) = expand(view_1, [2, 2, 3])
add: S(1) = add(view, expand)
_to_copy: S(0) = _to_copy(b_c, dtype=f32)
unsqueeze: S(1) = unsqueeze(_to_copy, 0)
add_1: S(1) = add(add, unsqueeze)
reshard: R = reshard(add_1)
return reshard
""",
    )


def test_tied_weights() -> None:
    """Cut by rows of the vocabulary, the table makes a Partial as an embedding and S(2) as a head."""
    assert_expected_inline(
        text(Tied(), (IDS,), {"embed": "embedding_rowwise"}),
        """\
p_embed_weight: S(0) = embed.weight f32[8, 4]
p_head_weight: S(0) = head.weight f32[8, 4]
ids: R = input i64[2, 3]
embedding: P(sum) = embedding(p_head_weight, ids)
reshard: R = reshard(embedding)
linear: S(2) = linear(reshard, p_head_weight)
reshard_1: R = reshard(linear)
return reshard_1
""",
    )


def test_mutated_buffers_keep_one_sharding() -> None:
    """The statistics of a batch norm are cut as the channels are, on the way in and on the way back."""
    module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
    assert_expected_inline(
        text(module, (X,), {"0": "colwise"}),
        """\
p_0_weight: S(0) = 0.weight f32[6, 4]
p_0_bias: S(0) = 0.bias f32[6]
p_1_weight: S(0) = 1.weight f32[6]
p_1_bias: S(0) = 1.bias f32[6]
b_1_running_mean: S(0) = 1.running_mean f32[6]
b_1_running_var: S(0) = 1.running_var f32[6]
b_1_num_batches_tracked: R = 1.num_batches_tracked i64[]
input: R = input f32[2, 4]
linear: S(1) = linear(input, p_0_weight, p_0_bias)
add: R = add(b_1_num_batches_tracked, 1)
_native_batch_norm_legit_functional: (S(1), S(0), S(0), S(0), S(0)) = _native_batch_norm_legit_functional(linear, p_1_weight, p_1_bias, b_1_running_mean, b_1_running_var, True, 0.1, 1e-05)
getitem: S(1) = getitem(_native_batch_norm_legit_functional, 0)
getitem_3: S(0) = getitem(_native_batch_norm_legit_functional, 3)
getitem_4: S(0) = getitem(_native_batch_norm_legit_functional, 4)
reshard: R = reshard(getitem)
return getitem_3, getitem_4, add, reshard
""",
    )
