"""Calls of backwards: one gradient sums over what another one keeps."""

from __future__ import annotations

import torch

from tests.rules.sample import call, ids, t

aten = torch.ops.aten
ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
CONVOLUTION = aten.convolution_backward.default
POOL = aten.max_pool2d_with_indices_backward.default

HEADS = t(2, 4, 6, 8), t(2, 4, 6, 8), t(2, 4, 5, 8), t(2, 4, 5, 8), t(2, 4, 6, 8), t(2, 4, 6)
SQUARE = t(3, 4, 5, 8), t(3, 4, 5, 8), t(3, 4, 5, 8), t(3, 4, 5, 8), t(3, 4, 5, 8), t(3, 4, 5)

BACKWARDS = [
    call(
        ATTENTION,
        *HEADS,
        0.0,
        False,
        text="b h s e!, b h s d!, b h t! d!, b h t! e!, b h s e!, b h s -> b h s d!, b h t! d! {s}, b h t! e! {s}",
    ),
    call(
        ATTENTION,
        *HEADS,
        0.0,
        False,
        attn_mask=t(2, 1, 6, 5),
        scale=0.3,
        text="b h s e!, b h s d!, b h t! d!, b h t! e!, b h s e!, b h s, b 1 s t! "
        "-> b h s d!, b h t! d! {s}, b h t! e! {s}",
    ),
    call(
        ATTENTION,
        *SQUARE,
        0.0,
        True,
        text="b h s! e!, b h s! d!, b h t! d!, b h t! e!, b h s! e!, b h s! -> b h s! d!, b h t! d!, b h t! e!",
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
        text="n c o0! o1!, n c s0! s1!, n c o0! o1! -> n c s0! s1!",
    ),
]
