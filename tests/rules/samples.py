"""One or more calls of every op that has a rule, each with the text of its rule.

Sizes of 3 to 7 give, over 2 to 4 ranks, even, uneven and empty shards.
"""

from __future__ import annotations

import torch
from torch import fx

from tests.rules.attention_samples import ATTENTION
from tests.rules.backward_samples import BACKWARDS
from tests.rules.convolution_samples import CONVOLUTIONS
from tests.rules.indexing_samples import INDEXING
from tests.rules.linalg_samples import FOURIER, FRACTIONAL, LINALG
from tests.rules.norm_samples import BAGS, GROUPED, TRIANGLES
from tests.rules.pointwise_samples import ELEMENTWISE
from tests.rules.product_samples import CONTRACTIONS, PRODUCTS_2
from tests.rules.quantized_samples import QUANTIZED
from tests.rules.recurrent_samples import RECURRENT
from tests.rules.reduction_samples import ORDERED, REDUCTIONS
from tests.rules.sample import call, distinct, flags, ids, t
from tests.rules.space_samples import POOLING, RESIZING, WINDOWS
from tests.rules.structure_samples import STRUCTURE
from tests.rules.vector_samples import VECTORS
from tests.rules.view_samples import VIEWS_2
from tpcompiler.rules.notation import RuleText
from tpcompiler.rules.registry import _POINTWISE, _RULES

aten = torch.ops.aten

PRODUCTS = [
    call(aten.linear.default, t(3, 4, 6), t(5, 6), t(5), text="b0 b1 k, n k, +n -> b0 b1 n"),
    call(aten.linear.default, t(4, 5), t(6, 5), text="b0 k, n k -> b0 n"),
    call(aten.linear.default, t(5), t(6, 5), t(6), text="k, n k, +n -> n"),
    call(aten.linear.default, t(4, 6), t(6), text="b0 k, k -> b0"),
    call(aten.mm.default, t(4, 6), t(6, 5), text="m k, k n -> m n"),
    call(aten.bmm.default, t(3, 4, 6), t(3, 6, 5), text="b m k, b k n -> b m n"),
    call(aten.addmm.default, t(5), t(4, 6), t(6, 5), text="+n, m k, k n -> m n"),
    call(aten.addmm.default, t(4, 1), t(4, 6), t(6, 5), beta=2.0, alpha=3.0, text="+m 1, m k, k n -> m n"),
    call(aten.addmm.default, t(), t(4, 6), t(6, 5), text="+, m k, k n -> m n"),
    call(aten.baddbmm.default, t(3, 1, 5), t(3, 4, 6), t(3, 6, 5), text="+b 1 n, b m k, b k n -> b m n"),
    call(aten.baddbmm.default, t(4, 5), t(3, 4, 6), t(3, 6, 5), alpha=0.5, text="+m n, b m k, b k n -> b m n"),
    call(aten.matmul.default, t(6), t(6), text="k, k ->"),
    call(aten.matmul.default, t(4, 6), t(6), text="m k, k -> m"),
    call(aten.matmul.default, t(6), t(3, 6, 5), text="k, b0 k n -> b0 n"),
    call(aten.matmul.default, t(4, 1, 5, 6), t(3, 6, 4), text="b0 1 m k, b1 k n -> b0 b1 m n"),
    call(aten.matmul.default, t(1, 5, 6), t(1, 6, 4), text="b0 m k, b0 k n -> b0 m n"),
]

LOOKUPS = [
    call(aten.embedding.default, t(7, 5), ids(3, 4, below=7), text="v d, i0 i1 -> i0 i1 d"),
    call(aten.embedding.default, t(12, 6), ids(5, below=12), 3, text="v d, i0 -> i0 d"),
    call(aten.embedding.default, t(6, 4), ids(below=6), text="v d, -> d"),
]

NORMS = [
    call(aten.layer_norm.default, t(4, 5, 6), [6], t(6), t(6), text="d0 d1 h0!, h0!, h0! -> d0 d1 h0!"),
    call(aten.layer_norm.default, t(5, 3, 4), [3, 4], text="d0 h0! h1! -> d0 h0! h1!"),
    call(aten.rms_norm.default, t(5, 6), [6], t(6), 1e-5, text="d0 h0!, h0! -> d0 h0!"),
    call(
        aten.native_layer_norm.default,
        t(4, 5, 6),
        [6],
        t(6),
        t(6),
        1e-5,
        text="d0 d1 h0!, h0!, h0! -> d0 d1 h0!, d0 d1 1, d0 d1 1",
    ),
    call(
        aten._native_batch_norm_legit_functional.default,
        t(4, 6, 3),
        t(6),
        t(6),
        t(6),
        t(6).abs(),
        True,
        0.1,
        1e-5,
        text="n! c s0!, c, c, c, c -> n! c s0!, c, c, c, c",
    ),
    call(
        aten._native_batch_norm_legit_functional.default,
        t(5, 4),
        None,
        None,
        t(4),
        t(4).abs(),
        True,
        0.1,
        1e-5,
        text="n! c, c, c -> n! c, c, c, c, c",
    ),
    call(
        aten._native_batch_norm_legit_no_training.default,
        t(4, 6, 3, 5),
        t(6),
        t(6),
        t(6),
        t(6).abs(),
        0.1,
        1e-5,
        text="n c s0! s1!, c, c, c, c -> n c s0! s1!, z!, z!",
    ),
]

POINTWISE = [
    call(aten.relu.default, t(3, 5), text="d0 d1 -> d0 d1"),
    call(aten.gelu.default, t(6, 4), approximate="tanh", text="d0 d1 -> d0 d1"),
    call(aten.exp.default, t(), text="->"),
    call(aten.silu.default, t(5), text="d0 -> d0"),
    call(aten.mish.default, t(5), text="d0 -> d0"),
    call(aten.pow.Tensor_Scalar, t(4, 1, 6), 2.0, text="d0 d1 d2 -> d0 d1 d2"),
    call(aten.add.Scalar, t(4, 5), 3.0, text="d0 d1 -> d0 d1"),
    call(aten.maximum.default, t(3, 5), t(5), text="d0 d1, d1 -> d0 d1"),
    call(aten.where.self, flags(4, 1), t(6), t(), text="d0 1, d1, -> d0 d1"),
    call(aten.clamp.Tensor, t(4, 6), None, t(4, 1), text="d0 d1, d0 1 -> d0 d1"),
    call(aten.eq.Tensor, ids(4, 5, below=3), ids(5, below=3), text="d0 d1, d1 -> d0 d1"),
    call(aten.frexp.Tensor, t(5, 4), text="d0 d1 -> d0 d1, d0 d1"),
    call(aten.copy.default, t(4, 5), t(5), text="d0 d1, d1 -> d0 d1"),
    call(aten.full_like.default, t(4, 5), 3.0, text="d0 d1 -> d0 d1"),
    call(aten.ones_like.default, t(4, 5), text="d0 d1 -> d0 d1"),
    call(aten.zeros_like.default, t(4, 5), dtype=torch.float32, text="d0 d1 -> d0 d1"),
    call(aten.masked_fill.Scalar, t(4, 5), flags(5), 2.0, text="d0 d1, d1 -> d0 d1"),
    call(aten.masked_fill.Tensor, t(1, 5), flags(6, 5), t(), text="1 d1, d0 d1, -> d0 d1"),
    call(aten.add.Tensor, t(4, 5), t(5), alpha=2, text="d0 d1, d1 -> d0 d1"),
    call(aten.add.Tensor, t(3, 6), 2.0, text="d0 d1 -> d0 d1"),
    call(aten.add.Tensor, distinct(4, 6), distinct(4, 6), text="d0 d1, d0 d1 -> d0 d1"),
    call(aten.sub.Tensor, t(1, 5), t(6, 1), text="1 d1, d0 1 -> d0 d1"),
    call(aten.sub.Tensor, t(4, 5), 1.0, text="d0 d1 -> d0 d1"),
    call(aten.mul.Tensor, t(4, 5), t(4, 1), text="d0 d1, d0 1 -> d0 d1"),
    call(aten.mul.Tensor, distinct(6), 3, text="d0 -> d0"),
    call(aten.mul.Scalar, t(6, 5), 3.0, text="d0 d1 -> d0 d1"),
    call(aten.neg.default, distinct(4, 5), text="d0 d1 -> d0 d1"),
    call(aten.div.Tensor, t(4, 5), t(5), text="d0 d1, d1 -> d0 d1"),
    call(aten.div.Scalar, t(6), 3.0, text="d0 -> d0"),
    call(aten.clone.default, t(4, 5), text="d0 d1 -> d0 d1"),
    call(aten._to_copy.default, t(4, 6), dtype=torch.float32, text="d0 d1 -> d0 d1"),
    call(aten.alias.default, t(4, 5), text="d0 d1 -> d0 d1"),
    call(aten.detach.default, t(5), text="d0 -> d0"),
    call(aten.contiguous.default, t(4, 5), text="d0 d1 -> d0 d1"),
    call(aten.lift_fresh_copy.default, t(6), text="d0 -> d0"),
    call(aten.to.dtype, distinct(5, 4), torch.float64, text="d0 d1 -> d0 d1"),
]

VIEWS = [
    call(aten.view.default, t(3, 24), [3, 6, 4], text="f0 (f1 f2) -> f0 f1 f2"),
    call(aten.view.default, t(5, 2, 3), [-1, 3], text="f0 f1 f2 -> (f0 f1) f2"),
    call(aten._unsafe_view.default, t(4, 6, 5), [24, 5], text="f0 f1 f2 -> (f0 f1) f2"),
    call(aten.reshape.default, t(5, 12), [5, 3, -1], text="f0 (f1 f2) -> f0 f1 f2"),
    call(aten.reshape.default, t(), [1, 1], text="-> 1 1"),
    call(aten.unsqueeze.default, t(5, 6), 1, text="f0 f1 -> f0 1 f1"),
    call(aten.squeeze.default, t(1, 3, 1, 4), text="1 f0 1 f1 -> f0 f1"),
    call(aten.squeeze.dim, t(3, 1, 4), 1, text="f0 1 f1 -> f0 f1"),
    call(aten.squeeze.dim, t(3, 4), 0, text="f0 f1 -> f0 f1"),
    call(aten.squeeze.dims, t(1, 3, 1, 4), [0, 1, -1], text="1 f0 1 f1 -> f0 1 f1"),
    call(aten.flatten.using_ints, t(3, 4, 5), 1, text="f0 f1 f2 -> f0 (f1 f2)"),
    call(aten.flatten.using_ints, t(), text="-> 1"),
    call(aten.unflatten.int, t(5, 12, 2), 1, [3, -1], text="f0 (f1 f2) f3 -> f0 f1 f2 f3"),
    call(aten.permute.default, t(3, 4, 5), [2, 0, -2], text="d0 d1 d2 -> d2 d0 d1"),
    call(aten.transpose.int, t(3, 4, 5), 0, -1, text="d0 d1 d2 -> d2 d1 d0"),
    call(aten.transpose.int, t(), 0, -1, text="->"),
    call(aten.t.default, t(5, 6), text="d0 d1 -> d1 d0"),
    call(aten.t.default, t(5), text="d0 -> d0"),
    call(aten.movedim.int, t(3, 4, 5, 6), 0, 2, text="d0 d1 d2 d3 -> d1 d2 d0 d3"),
    call(aten.movedim.int, t(3, 4, 5, 6), -1, 0, text="d0 d1 d2 d3 -> d3 d0 d1 d2"),
    call(aten.expand.default, t(5, 1), [3, 5, 4], text="d1 1 -> n0 d1 n2"),
    call(aten.expand.default, t(1, 6, 4), [-1, 6, -1], text="d0 d1 d2 -> d0 d1 d2"),
    call(aten.expand.default, t(), [4, 3], text="-> n0 n1"),
]

SAMPLES = [
    *PRODUCTS,
    *PRODUCTS_2,
    *CONTRACTIONS,
    *CONVOLUTIONS,
    *ATTENTION,
    *BACKWARDS,
    *LOOKUPS,
    *INDEXING,
    *NORMS,
    *POOLING,
    *WINDOWS,
    *RESIZING,
    *POINTWISE,
    *GROUPED,
    *BAGS,
    *TRIANGLES,
    *ELEMENTWISE,
    *REDUCTIONS,
    *ORDERED,
    *STRUCTURE,
    *QUANTIZED,
    *VECTORS,
    *LINALG,
    *FOURIER,
    *FRACTIONAL,
    *VIEWS,
    *VIEWS_2,
    *RECURRENT,
]


def written_of(node: fx.Node) -> RuleText | None:
    """What the rule function writes for the node."""
    entry = _RULES.get(node.target) or _POINTWISE[0]
    written = entry.write(node)
    return RuleText(written) if isinstance(written, str) else written
