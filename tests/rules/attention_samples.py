"""Calls of attention: masks of every form, grouped queries, what broadcasts."""

from __future__ import annotations

import torch

from tests.rules import kernels  # noqa: F401  (runs kernels of a GPU on the CPU)
from tests.rules.sample import call, flags, t

aten = torch.ops.aten
sdpa = aten.scaled_dot_product_attention.default
FLASH = aten._scaled_dot_product_flash_attention.default
EFFICIENT = aten._scaled_dot_product_efficient_attention.default
CUDNN = aten._scaled_dot_product_cudnn_attention.default
CPU = aten._scaled_dot_product_flash_attention_for_cpu.default

ATTENTION = [
    call(
        sdpa,
        t(2, 4, 6, 8),
        t(2, 4, 5, 8),
        t(2, 4, 5, 12),
        text="b0 h s d!, b0 h t! d!, b0 h t! e -> b0 h s e",
    ),
    call(
        sdpa,
        t(5, 6, 8),
        t(5, 6, 8),
        t(5, 6, 8),
        None,
        0.0,
        True,
        scale=0.3,
        text="h s! d!, h t! d!, h t! e -> h s! e",
    ),
    call(sdpa, t(4, 8), t(6, 8), t(6, 8), text="s d!, t! d!, t! e -> s e"),
    call(sdpa, t(4, 8), t(6, 8), t(6, 8), t(4, 6), text="s d!, t! d!, t! e, s t! -> s e"),
    call(sdpa, t(3, 4, 8), t(3, 6, 8), t(3, 6, 8), t(4, 1), text="h s d!, h t! d!, h t! e, s 1 -> h s e"),
    call(
        sdpa,
        t(2, 3, 2, 3, 4),
        t(2, 3, 2, 5, 4),
        t(2, 3, 2, 5, 4),
        t(3, 1, 3, 5),
        text="b0 b1 h s d!, b0 b1 h t! d!, b0 b1 h t! e, b1 1 s t! -> b0 b1 h s e",
    ),
    call(
        sdpa,
        t(2, 8, 3, 4),
        t(2, 2, 5, 4),
        t(2, 2, 5, 4),
        t(1, 1, 3, 5),
        enable_gqa=True,
        text="b0 (h g) s d!, b0 h t! d!, b0 h t! e, 1 1 s t! -> b0 (h g) s e",
    ),
    call(
        sdpa,
        t(2, 6, 3, 4),
        t(2, 3, 5, 4),
        t(2, 3, 5, 4),
        t(2, 6, 1, 5),
        enable_gqa=True,
        text="b0 (h g) s d!, b0 h t! d!, b0 h t! e, b0 (h g) 1 t! -> b0 (h g) s e",
    ),
    call(
        sdpa,
        t(2, 6, 4, 4),
        t(2, 6, 5, 4),
        t(2, 6, 5, 4),
        flags(2, 6, 4, 1) | True,
        text="b0 h s d!, b0 h t! d!, b0 h t! e, b0 h s 1 -> b0 h s e",
    ),
    call(
        sdpa,
        t(2, 6, 4, 4),
        t(2, 6, 5, 4),
        t(2, 6, 5, 4),
        flags(4, 5) | torch.eye(4, 5, dtype=torch.bool),
        text="b0 h s d!, b0 h t! d!, b0 h t! e, s t! -> b0 h s e",
    ),
    call(
        sdpa,
        t(2, 4, 3, 4),
        t(2, 1, 5, 4),
        t(2, 1, 5, 4),
        enable_gqa=True,
        text="b0 (h g) s d!, b0 h t! d!, b0 h t! e -> b0 (h g) s e",
    ),
    call(
        sdpa,
        t(2, 4, 6, 8),
        t(2, 1, 6, 8),
        t(2, 4, 6, 8),
        text="b0 h s d!, b0 1 t! d!, b0 h t! e -> b0 h s e",
    ),
    call(
        sdpa,
        t(4, 6, 8),
        t(4, 6, 8),
        t(1, 6, 8),
        text="h s d!, h t! d!, 1 t! e -> h s e",
    ),
    call(
        sdpa,
        t(3, 4, 6, 8),
        t(1, 4, 6, 8),
        t(1, 4, 6, 8),
        text="b0 h s d!, 1 h t! d!, 1 h t! e -> b0 h s e",
    ),
    call(
        sdpa,
        t(1, 4, 6, 8),
        t(3, 4, 5, 8),
        t(3, 4, 5, 8),
        text="1 h s d!, b0 h t! d!, b0 h t! e -> b0 h s e",
    ),
    call(
        sdpa,
        t(2, 4, 6, 8),
        t(4, 6, 8),
        t(4, 6, 8),
        text="b0 h s d!, h t! d!, h t! e -> b0 h s e",
    ),
    call(sdpa, t(4, 6, 8), t(4, 6, 8), t(4, 6, 8), None, 0.1, text=None),
    call(
        sdpa,
        t(2, 8, 3, 4),
        t(2, 2, 5, 4),
        t(2, 4, 5, 4),
        enable_gqa=True,
        text="b0 (h i g) s d!, b0 h t! d!, b0 (h i) t! e -> b0 (h i g) s e",
    ),
    call(
        sdpa,
        t(2, 8, 3, 4),
        t(2, 8, 5, 4),
        t(2, 4, 5, 4),
        enable_gqa=True,
        text="b0 (h i g) s d!, b0 (h i) t! d!, b0 h t! e -> b0 (h i g) s e",
    ),
    call(
        sdpa,
        t(2, 6, 3, 4),
        t(2, 2, 5, 4),
        t(2, 3, 5, 4),
        enable_gqa=True,
        text="b0 q! s d!, b0 k! t! d!, b0 v! t! e -> b0 q! s e",
    ),
    call(
        CPU,
        t(3, 4, 6, 8),
        t(3, 4, 6, 8),
        t(3, 4, 6, 8),
        0.0,
        True,
        text="b0 h s! d!, b0 h t! d!, b0 h t! e! -> b0 h s! e!, b0 h s!",
    ),
    call(
        CPU,
        t(2, 5, 6, 8),
        t(2, 5, 4, 8),
        t(2, 5, 4, 8),
        attn_mask=t(2, 5, 6, 4),
        scale=0.1,
        text="b0 h s d!, b0 h t! d!, b0 h t! e!, b0 h s t! -> b0 h s e!, b0 h s",
    ),
    call(
        FLASH,
        t(2, 4, 3, 8),
        t(2, 2, 5, 8),
        t(2, 2, 5, 8),
        0.0,
        True,
        text="b0 (h g) s! d!, b0 h t! d!, b0 h t! e! -> b0 (h g) s! e!, b0 (h g) x00!, x10!,, x30!",
    ),
    call(
        EFFICIENT,
        t(2, 4, 3, 8),
        t(2, 4, 5, 8),
        t(2, 4, 5, 8),
        t(2, 4, 3, 5),
        True,
        text="b0 h s! d!, b0 h t! d!, b0 h t! e!, b0 h s! t! -> b0 h s! e!, b0 h x00!,,",
    ),
    call(
        CUDNN,
        t(2, 4, 3, 8),
        t(2, 4, 5, 8),
        t(2, 4, 5, 8),
        None,
        True,
        text="b0 h s! d!, b0 h t! d!, b0 h t! e! -> b0 h s! e!, b0 h x00! x01!,,",
    ),
]
