"""Calls of backwards: one gradient sums over what another one keeps."""

from __future__ import annotations

import re

import torch

from tests.rules.kernels import attend
from tests.rules.sample import call, ids, t

aten = torch.ops.aten
ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
CONVOLUTION = aten.convolution_backward.default
POOL = aten.max_pool2d_with_indices_backward.default

FLASH = aten._scaled_dot_product_flash_attention_backward.default
EFFICIENT = aten._scaled_dot_product_efficient_attention_backward.default
CUDNN = aten._scaled_dot_product_cudnn_attention_backward.default

HEADS = t(2, 4, 6, 8), t(2, 4, 6, 8), t(2, 4, 5, 8), t(2, 4, 5, 8), t(2, 4, 6, 8), t(2, 4, 6)
SQUARE = t(3, 4, 5, 8), t(3, 4, 5, 8), t(3, 4, 5, 8), t(3, 4, 5, 8), t(3, 4, 5, 8), t(3, 4, 5)

FEW = t(2, 4, 6, 8), t(2, 2, 5, 8), t(2, 2, 5, 8)  # grouped queries
STATE = torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)  # of a generator


def forwarded(bias: torch.Tensor | None = None, causal: bool = False, *few: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A gradient, queries, keys, values, and the result and sums of their attention."""
    q, k, v = few or HEADS[1:4]
    return (t(*q.shape), q, k, v, *attend(q, k, v, bias, causal, None))


def padded(sums: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(sums, (0, 2))


BIAS, SHARED = t(2, 4, 6, 5), t(2, 1, 6, 5)
PLAIN, CAUSAL, GROUPED = forwarded(), forwarded(None, True), forwarded(None, False, *FEW)
BIASED, OVER_HEADS = forwarded(BIAS), forwarded(SHARED)
NO_LENGTHS = None, None, 6, 5

KERNELS = [
    call(
        FLASH,
        *PLAIN,
        *NO_LENGTHS,
        0.0,
        False,
        *STATE,
        text="b h s! e!, b h s! d!, b h t d!, b h t e!, b h s! e!, b h x0!,, -> b h s! d! {t}, b h t d!, b h t e!",
    ),
    call(
        FLASH,
        *CAUSAL,
        *NO_LENGTHS,
        0.0,
        True,
        *STATE,
        text="b h s! e!, b h s! d!, b h t! d!, b h t! e!, b h s! e!, b h x0!,, -> b h s! d!, b h t! d!, b h t! e!",
    ),
    call(
        FLASH,
        *GROUPED,
        *NO_LENGTHS,
        0.0,
        False,
        *STATE,
        text="b (h g) s! e!, b (h g) s! d!, b h t d!, b h t e!, b (h g) s! e!, b (h g) x0!,, "
        "-> b (h g) s! d! {t}, b h t d! {g}, b h t e! {g}",
    ),
    call(FLASH, *PLAIN, *NO_LENGTHS, 0.1, False, *STATE, text=None),
    call(
        EFFICIENT,
        *PLAIN[:4],
        None,
        PLAIN[4],
        padded(PLAIN[5]),
        *STATE,
        0.0,
        [True, True, True, False],
        text="b h s! e!, b h s! d!, b h t d!, b h t e!, b h s! e!, b h x0!,, -> b h s! d! {t}, b h t d!, b h t e!",
    ),
    call(
        EFFICIENT,
        *BIASED[:4],
        BIAS,
        BIASED[4],
        padded(BIASED[5]),
        *STATE,
        0.0,
        [True] * 4,
        text="b h s! e!, b h s! d!, b h t! d!, b h t! e!, b h s! t!, b h s! e!, b h x0!,, "
        "-> b h s! d!, b h t! d!, b h t! e!, b h s! t!",
    ),
    call(
        EFFICIENT,
        *OVER_HEADS[:4],
        SHARED,
        OVER_HEADS[4],
        padded(OVER_HEADS[5]),
        *STATE,
        0.0,
        [True] * 4,
        scale=0.3,
        text="b h s! e!, b h s! d!, b h t! d!, b h t! e!, b 1 s! t!, b h s! e!, b h x0!,, "
        "-> b h s! d!, b h t! d!, b h t! e!, b 1 s! t! {h}",
    ),
    call(
        CUDNN,
        *BIASED[:5],
        BIASED[5].unsqueeze(-1),
        *STATE,
        BIAS,
        *NO_LENGTHS,
        0.0,
        False,
        text="b h s! e!, b h s! d!, b h t! d!, b h t! e!, b h s! e!, b h x0! x1!,,, b h s! t! "
        "-> b h s! d!, b h t! d!, b h t! e!",
    ),
]

BACKWARDS = [
    call(
        ATTENTION,
        *HEADS,
        0.0,
        False,
        text="b h s e!, b h s d!, b h t d!, b h t e!, b h s e!, b h s -> b h s d! {t}, b h t d! {s}, b h t e! {s}",
    ),
    call(
        ATTENTION,
        *HEADS,
        0.0,
        False,
        attn_mask=t(2, 1, 6, 5),
        scale=0.3,
        text="b h s e!, b h s d!, b h t d!, b h t e!, b h s e!, b h s, b 1 s t "
        "-> b h s d! {t}, b h t d! {s}, b h t e! {s}",
    ),
    call(
        ATTENTION,
        *SQUARE,
        0.0,
        True,
        text="b h s! e!, b h s! d!, b h t! d!, b h t! e!, b h s! e!, b h s! -> b h s! d!, b h t! d!, b h t! e!",
    ),
    call(
        ATTENTION,
        *forwarded(None, False, *FEW),
        0.0,
        False,
        text="b (h g) s e!, b (h g) s d!, b h t d!, b h t e!, b (h g) s e!, b (h g) s "
        "-> b (h g) s d! {t}, b h t d! {s g}, b h t e! {s g}",
    ),
    call(ATTENTION, *HEADS, 0.5, False, text=None),
    call(
        CONVOLUTION,
        t(4, 6, 5),
        t(4, 3, 7),
        t(6, 3, 3),
        None,
        [1],
        [0],
        [1],
        False,
        [0],
        1,
        [True, True, False],
        text="n o q0!, n i s0!, o i k0! -> n i s0! {o}, o i k0! {n}",
    ),
    call(
        CONVOLUTION,
        t(4, 6, 5, 4),
        t(4, 3, 7, 4),
        t(6, 3, 3, 1),
        None,
        [1, 1],
        [0, 0],
        [1, 1],
        False,
        [0, 0],
        1,
        [False, True, False],
        text="n o q0! q1!, n i s0! s1!, o i k0! k1! -> o i k0! k1! {n}",
    ),
    call(  # groups
        CONVOLUTION,
        t(3, 8, 5),
        t(3, 4, 5),
        t(8, 2, 3),
        None,
        [1],
        [1],
        [1],
        False,
        [0],
        2,
        [True, True, False],
        text="n (g o) q0!, n (g i) s0!, (g o) i k0! -> n (g i) s0! {o}, (g o) i k0! {n}",
    ),
    call(  # depthwise
        CONVOLUTION,
        t(3, 6, 5),
        t(3, 6, 7),
        t(6, 1, 3),
        None,
        [1],
        [0],
        [1],
        False,
        [0],
        6,
        [True, True, False],
        text="n (g o) q0!, n (g i) s0!, (g o) i k0! -> n (g i) s0! {o}, (g o) i k0! {n}",
    ),
    call(
        CONVOLUTION,
        t(4, 3, 9),
        t(4, 6, 4),
        t(6, 3, 3),
        None,
        [2],
        [0],
        [1],
        True,
        [0],
        1,
        [True, True, False],
        text="n o q0!, n i s0!, i o k0! -> n i s0! {o}, i o k0! {n}",
    ),
    call(
        POOL,
        t(3, 4, 2, 3),
        t(3, 4, 4, 6),
        [2, 2],
        [2, 2],
        [0, 0],
        [1, 1],
        False,
        ids(3, 4, 2, 3, below=24),
        text="d0 d1 o0! o1!, d0 d1 s0! s1!, d0 d1 o0! o1! -> d0 d1 s0! s1!",
    ),
    call(
        POOL,
        t(4, 2, 3),
        t(4, 4, 6),
        [2, 2],
        [2, 2],
        [0, 0],
        [1, 1],
        False,
        ids(4, 2, 3, below=24),
        text="d0 o0! o1!, d0 s0! s1!, d0 o0! o1! -> d0 s0! s1!",
    ),
    call(
        aten.max_pool3d_with_indices_backward.default,
        t(3, 4, 1, 2, 2),
        t(3, 4, 2, 4, 4),
        [2],
        [2],
        [0],
        [1],
        False,
        ids(3, 4, 1, 2, 2, below=32),
        text="d0 d1 o0! o1! o2!, d0 d1 s0! s1! s2!, d0 d1 o0! o1! o2! -> d0 d1 s0! s1! s2!",
    ),
    call(
        aten.adaptive_max_pool2d_backward.default,
        t(3, 5, 2, 2),
        t(3, 5, 4, 4),
        ids(3, 5, 2, 2, below=16),
        text="d0 d1 o0! o1!, d0 d1 s0! s1!, d0 d1 o0! o1! -> d0 d1 s0! s1!",
    ),
    call(
        aten.adaptive_max_pool3d_backward.default,
        t(5, 2, 2, 2),
        t(5, 4, 2, 4),
        ids(5, 2, 2, 2, below=32),
        text="d0 o0! o1! o2!, d0 s0! s1! s2!, d0 o0! o1! o2! -> d0 s0! s1! s2!",
    ),
    call(
        aten.fractional_max_pool2d_backward.default,
        t(3, 4, 2, 2),
        t(3, 4, 4, 5),
        [2, 2],
        [2, 2],
        ids(3, 4, 2, 2, below=20),
        text="d0 d1 o0! o1!, d0 d1 s0! s1!, d0 d1 o0! o1! -> d0 d1 s0! s1!",
    ),
    call(
        aten.fractional_max_pool3d_backward.default,
        t(3, 4, 2, 2, 2),
        t(3, 4, 4, 5, 3),
        [2, 2, 2],
        [2, 2, 2],
        ids(3, 4, 2, 2, 2, below=60),
        text="d0 d1 o0! o1! o2!, d0 d1 s0! s1! s2!, d0 d1 o0! o1! o2! -> d0 d1 s0! s1! s2!",
    ),
    call(
        aten.avg_pool2d_backward.default,
        t(3, 4, 4, 3),
        t(3, 4, 8, 4),
        [2],
        [2, 1],
        [0],
        False,
        True,
        None,
        text="d0 d1 o0 o1!, d0 d1 (o0 k0!) s1! -> d0 d1 (o0 k0!) s1!",
    ),
    call(
        aten.avg_pool2d_backward.default,
        t(4, 3, 3),
        t(4, 6, 6),
        [3, 3],
        [2, 2],
        [1, 1],
        False,
        False,
        3,
        text="d0 o0! o1!, d0 s0! s1! -> d0 s0! s1!",
    ),
    call(
        aten.avg_pool3d_backward.default,
        t(3, 4, 3, 2, 2),
        t(3, 4, 6, 4, 4),
        [2],
        [],
        [0],
        False,
        True,
        None,
        text="d0 d1 o0 o1 o2, d0 d1 (o0 k0!) (o1 k1!) (o2 k2!) -> d0 d1 (o0 k0!) (o1 k1!) (o2 k2!)",
    ),
    call(
        aten._adaptive_avg_pool2d_backward.default,
        t(3, 4, 3, 2),
        t(3, 4, 6, 5),
        text="d0 d1 o0 o1!, d0 d1 (o0 k0!) s1! -> d0 d1 (o0 k0!) s1!",
    ),
    call(
        aten._adaptive_avg_pool3d_backward.default,
        t(4, 3, 2, 2),
        t(4, 6, 5, 2),
        text="d0 o0 o1! o2, d0 (o0 k0!) s1! (o2 k2!) -> d0 (o0 k0!) s1! (o2 k2!)",
    ),
    call(
        aten.replication_pad1d_backward.default,
        t(4, 3, 9),
        t(4, 3, 6),
        [1, 2],
        text="d0 d1 o0!, d0 d1 s0! -> d0 d1 s0!",
    ),
    call(
        aten.replication_pad2d_backward.default,
        t(4, 3, 6, 6),
        t(4, 3, 4, 3),
        [1, 2, 0, 2],
        text="d0 d1 o0! o1!, d0 d1 s0! s1! -> d0 d1 s0! s1!",
    ),
    call(
        aten.replication_pad3d_backward.default,
        t(4, 4, 5, 5),
        t(4, 3, 4, 3),
        [1, 1, 0, 1, 1, 0],
        text="d0 o0! o1! o2!, d0 s0! s1! s2! -> d0 s0! s1! s2!",
    ),
    *(
        call(
            op,
            t(4, 3, *[6, 5, 4][:space]),
            [6, 5, 4][:space],
            [4, 3, *[3, 4, 2][:space]],
            *([False] if "nearest" not in str(op) else []),
            text=f"d0 d1 {' '.join(f'o{d}!' for d in range(space))} -> d0 d1 {' '.join(f's{d}!' for d in range(space))}",
        )
        for op, space in (
            (aten.upsample_nearest1d_backward.default, 1),
            (aten.upsample_nearest2d_backward.default, 2),
            (aten.upsample_nearest3d_backward.default, 3),
            (aten._upsample_nearest_exact1d_backward.default, 1),
            (aten._upsample_nearest_exact2d_backward.default, 2),
            (aten._upsample_nearest_exact3d_backward.default, 3),
            (aten.upsample_linear1d_backward.default, 1),
            (aten.upsample_bilinear2d_backward.default, 2),
            (aten.upsample_trilinear3d_backward.default, 3),
            (aten.upsample_bicubic2d_backward.default, 2),
            (aten._upsample_bilinear2d_aa_backward.default, 2),
            (aten._upsample_bicubic2d_aa_backward.default, 2),
        )
    ),
    call(
        aten.grid_sampler_2d_backward.default,
        t(3, 4, 5, 2),
        t(3, 4, 3, 3),
        t(3, 5, 2, 2),
        0,
        0,
        False,
        [True, True],
        text="n c o0 o1, n c s0! s1!, n o0 o1 x! -> n c s0! s1! {o0 o1}, n o0 o1 x! {c}",
    ),
    call(
        aten.grid_sampler_3d_backward.default,
        t(3, 4, 2, 5, 2),
        t(3, 4, 3, 2, 3),
        t(3, 2, 5, 2, 3),
        0,
        1,
        True,
        [True, False],
        text="n c o0 o1 o2, n c s0! s1! s2!, n o0 o1 o2 x! -> n c s0! s1! s2! {o0 o1 o2}, n o0 o1 o2 x! {c}",
    ),
    *(
        call(
            aten._cdist_backward.default,
            t(3, 4, 5),
            t(3, 4, 6),
            t(3, 5, 6),
            p,
            t(3, 4, 5).abs(),
            text="b0 m n, b0 m k, b0 n k, b0 m n -> b0 m k",
        )
        for p in (1.0, 2.0, 3.0)
    ),
    call(aten._pdist_backward.default, t(10), t(5, 6), 3.0, t(10).abs(), text="q!, n! k, q! -> n! k"),
    *(
        call(op, t(4, 5), *given, text="d0 d1, d0 d1 -> d0 d1")
        for op, given in {
            aten.elu_backward.default: (0.5, 2.0, 1.5, False, t(4, 5)),
            aten.gelu_backward.default: (t(4, 5),),
            aten.hardshrink_backward.default: (t(4, 5), 0.5),
            aten.hardsigmoid_backward.default: (3 * t(4, 5),),
            aten.hardswish_backward.default: (3 * t(4, 5),),
            aten.hardtanh_backward.default: (t(4, 5), -0.5, 0.5),
            aten.leaky_relu_backward.default: (t(4, 5), 0.1, False),
            aten.mish_backward.default: (t(4, 5),),
            aten.sigmoid_backward.default: (t(4, 5).sigmoid(),),
            aten.silu_backward.default: (t(4, 5),),
            aten.softplus_backward.default: (t(4, 5), 2.0, 1.0),
            aten.softshrink_backward.default: (t(4, 5), 0.5),
            aten.tanh_backward.default: (t(4, 5).tanh(),),
            aten.threshold_backward.default: (t(4, 5), 0.1),
        }.items()
    ),
    *(
        call(
            aten.nll_loss_backward.default,
            grad,
            t(9, 5),
            ids(9, below=5),
            *(weight, reduction, ignored),
            t().abs(),
            text=f"{'n' * grad.ndim}, n c, n,{' c,' * (weight is not None)} -> n c",
        )
        for grad, weight, reduction, ignored in (
            (t(), None, 1, -100),
            (t(), t(5), 2, 0),
            (t(9), t(5), 0, 2),
        )
    ),
    call(
        aten.nll_loss2d_backward.default,
        *(t(), t(4, 5, 2, 3), ids(4, 2, 3, below=5)),
        *(None, 1, 3, t().abs()),
        text=", n c s0 s1, n s0 s1, -> n c s0 s1",
    ),
    call(
        aten.embedding_dense_backward.default,
        t(3, 4, 5),
        ids(3, 4, below=7),
        7,
        -1,
        False,
        text="i0 i1 d, i0 i1 -> v d",
    ),
    call(aten.embedding_dense_backward.default, t(9, 5), ids(9, below=6), 6, 2, False, text="i0 d, i0 -> v d"),
    call(aten.embedding_dense_backward.default, t(9, 5), ids(9, below=6), 6, 2, True, text="i0! d, i0! -> v! d"),
    call(
        aten._softmax_backward_data.default,
        t(6, 4, 3),
        t(6, 4, 3).softmax(1),
        1,
        torch.float32,
        text="d0 d1! d2, d0 d1! d2 -> d0 d1! d2",
    ),
    call(
        aten._log_softmax_backward_data.default,
        t(4, 5),
        t(4, 5).log_softmax(0),
        0,
        torch.float32,
        text="d0! d1, d0! d1 -> d0! d1",
    ),
    call(
        aten.rrelu_with_noise_backward.default,
        t(4, 5),
        t(4, 5),
        t(4, 5),
        0.1,
        0.3,
        False,
        False,
        text="d0 d1, d0 d1, d0 d1 -> d0 d1",
    ),
    *KERNELS,
]

# Kernels that do not check their operands: of the forward's operand they take the sizes alone, and of indices or
# padding that lie outside they write to where they say.
UNCHECKED = {
    sample.target
    for sample in BACKWARDS
    if re.search(r"_pool\dd(_with_indices)?_backward|replication_pad|nll|embedding", str(sample))
}
