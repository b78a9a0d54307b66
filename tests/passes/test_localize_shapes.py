"""Global sizes become this rank's own, and every value is checked against its claim."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch.export import Dim

from tests.passes.models import HEADS, Attention
from tests.passes.stages import Call, local, routed
from tpcompiler.errors import InternalError
from tpcompiler.ir.dim_sharding import WHOLE, DimSharding
from tpcompiler.ir.node_placement import PLACEMENT
from tpcompiler.ir.sharding import Sharding
from tpcompiler.ir.text import program_text
from tpcompiler.passes.localize_shapes import localize_shapes
from tpcompiler.passes.lower_reshards import lower_reshards

X = torch.randn(2, 4)
IDS = torch.tensor([[1, 5, 7], [0, 2, 2]])


def text(*args: Any, **kwargs: Any) -> str:
    return program_text(local(*args, **kwargs))


def test_size_arguments_of_views() -> None:
    assert_expected_inline(
        text(Attention(), (torch.randn(2, 3, 8),), HEADS),
        """\
p_q_weight: S(0) = q.weight f32[4, 8]
p_q_bias: S(0) = q.bias f32[4]
p_k_weight: S(0) = k.weight f32[2, 8]
p_v_weight: S(0) = v.weight f32[2, 8]
p_v_bias: S(0) = v.bias f32[2]
p_o_weight: S(1) = o.weight f32[8, 4]
p_o_bias: P(sum) = o.bias f32[8]
x: R = input f32[2, 3, 8]
linear: S(2) = linear(x, p_q_weight, p_q_bias)
view: S(2) = view(linear, [2, 3, 2, 2])
transpose: S(1) = transpose(view, 1, 2)
linear_1: S(2) = linear(x, p_k_weight)
view_1: S(2) = view(linear_1, [2, 3, 1, 2])
transpose_1: S(1) = transpose(view_1, 1, 2)
linear_2: S(2) = linear(x, p_v_weight, p_v_bias)
view_2: S(2) = view(linear_2, [2, 3, 1, 2])
transpose_2: S(1) = transpose(view_2, 1, 2)
scaled_dot_product_attention: S(1) = scaled_dot_product_attention(transpose, transpose_1, transpose_2, None, 0.0, True, enable_gqa=True)
transpose_3: S(2) = transpose(scaled_dot_product_attention, 1, 2)
view_3: S(2) = view(transpose_3, [2, 3, 4])
linear_3: P(sum) = linear(view_3, p_o_weight, p_o_bias)
all_reduce = all_reduce(linear_3, 'sum', 'tp=2:tp')
wait_tensor: R = wait_tensor(all_reduce)
return wait_tensor
""",
    )


def test_open_sizes_are_named_where_a_shard_may_be_empty() -> None:
    """Of nothing, a -1 could be any size."""
    module = Call(lambda self, x: x.view(3, 2, -1))
    assert_expected_inline(
        text(module, (torch.randn(3, 8),), inputs=["S(0)"], outputs=["S(0)"], degree=4, rank=3),
        """\
x: S(0) = input f32[0, 8]
view: S(0) = view(x, [0, 2, 4])
return view
""",
    )


def test_a_vocabulary_in_parts() -> None:
    """Rank 1 looks up the rows 4 to 8; the others are zeros, so that the sum over ranks is the look-up."""
    module = Call(lambda self, ids: self.embed(ids), embed=nn.Embedding(8, 4))
    assert_expected_inline(
        text(module, (IDS,), {"embed": "embedding_rowwise"}, rank=1),
        """\
p_embed_weight: S(0) = embed.weight f32[4, 4]
ids: R = input i64[2, 3]
rank_number = rank_number([4])
sub = sub(ids, rank_number)
lt = lt(sub, 0)
ge = ge(sub, 4)
bitwise_or = bitwise_or(lt, ge)
scalar_tensor = scalar_tensor(0, dtype=i64, layout=torch.strided, device=device(type='cpu'))
where = where(bitwise_or, scalar_tensor, sub)
embedding_1 = embedding(p_embed_weight, where)
unsqueeze = unsqueeze(bitwise_or, -1)
masked_fill: P(sum) = masked_fill(embedding_1, unsqueeze, 0)
all_reduce = all_reduce(masked_fill, 'sum', 'tp=2:tp')
wait_tensor: R = wait_tensor(all_reduce)
return wait_tensor
""",
    )


def test_dynamic_sizes_keep_their_global_meaning() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        return h.view(x.shape[0], 2, 3) / x.shape[0]

    dynamic = {"x": {0: Dim("batch", min=2)}}
    assert_expected_inline(
        text(Call(forward, up=nn.Linear(4, 6)), (X,), {"up": "colwise"}, dynamic_shapes=dynamic),
        """\
p_up_weight: S(0) = up.weight f32[3, 4]
p_up_bias: S(0) = up.bias f32[3]
x: R = input f32[s77, 4]
sym_size_int_1 = sym_size(x, 0)
linear: S(1) = linear(x, p_up_weight, p_up_bias)
view: S(1) = view(linear, [sym_size_int_1, 1, 3])
div: S(1) = div(view, sym_size_int_1)
unsqueeze = unsqueeze(div, 0)
all_gather_into_tensor = all_gather_into_tensor(unsqueeze, 2, 'tp=2:tp')
wait_tensor = wait_tensor(all_gather_into_tensor)
permute = permute(wait_tensor, [1, 0, 2, 3])
clone = clone(permute, memory_format=torch.contiguous_format)
sym_size_int = sym_size(div, 0)
view_1: R = view(clone, [sym_size_int, 2, 3])
return view_1
""",
    )


def test_a_claim_that_does_not_hold() -> None:
    module = Call(lambda self, x: self.up(x).relu(), up=nn.Linear(4, 6))
    program = lower_reshards(routed(module, (X,), {"up": "colwise"}, outputs=["S(1)"]), (0,), {})
    node = next(node for node in program.graph.nodes if node.name == "relu")
    lie = Sharding((DimSharding.by("tp"), WHOLE))
    node.meta[PLACEMENT] = replace(node.meta[PLACEMENT], shardings=(lie,))
    with pytest.raises(InternalError) as error:
        localize_shapes(program, {})
    assert_expected_inline(
        str(error.value),
        """\
'relu' (aten.relu.default) on rank 0 is [2, 3], but its sharding S(0) of [2, 6] says [1, 6]
  help: report this with the model and the plan""",
    )
