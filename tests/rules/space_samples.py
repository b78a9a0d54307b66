"""Calls of ops on images: pooling, columns, windows, resizing, sampling."""

from __future__ import annotations

import torch

from tests.rules.sample import call, t

aten = torch.ops.aten

POOLING = [
    call(
        aten.max_pool2d_with_indices.default,
        t(4, 6, 5, 4),
        [3, 2],
        [2, 1],
        [1, 0],
        text="d0 d1 s0! s1! -> d0 d1 o0 o1, d0 d1 o0 o1",
    ),
    call(aten.max_pool2d_with_indices.default, t(5, 4, 4), [2], text="d0 s0! s1! -> d0 o0 o1, d0 o0 o1"),
    call(
        aten.max_pool3d_with_indices.default,
        t(3, 5, 2, 3, 4),
        [2],
        text="d0 d1 s0! s1! s2! -> d0 d1 o0 o1 o2, d0 d1 o0 o1 o2",
    ),
    call(aten.adaptive_max_pool2d.default, t(4, 5, 6, 4), [3, 2], text="d0 d1 s0! s1! -> d0 d1 o0 o1, d0 d1 o0 o1"),
    call(aten.adaptive_max_pool3d.default, t(5, 3, 4, 5), [2, 1, 3], text="d0 s0! s1! s2! -> d0 o0 o1 o2, d0 o0 o1 o2"),
    call(aten.max_pool1d.default, t(3, 5, 12), [3], text="d0 d1 (o0 k0!) -> d0 d1 o0"),
    call(aten.max_pool1d.default, t(5, 13), [3], [3], text="d0 s0! -> d0 o0"),
    call(aten.max_pool1d.default, t(5, 12), [3], [3], [0], [2], text="d0 s0! -> d0 o0"),
    call(aten.max_pool2d.default, t(4, 5, 8, 6), [2, 3], text="d0 d1 (o0 k0!) (o1 k1!) -> d0 d1 o0 o1"),
    call(aten.max_pool2d.default, t(5, 8, 7), [2], [2], [1], [1], True, text="d0 s0! s1! -> d0 o0 o1"),
    call(aten.max_pool3d.default, t(3, 4, 6, 4, 5), [2, 2, 3], text="d0 d1 (o0 k0!) (o1 k1!) s2! -> d0 d1 o0 o1 o2"),
    call(aten.avg_pool1d.default, t(4, 6, 9), [3], text="d0 d1 (o0 k0!) -> d0 d1 o0"),
    call(aten.avg_pool2d.default, t(4, 5, 6, 4), [2], [2], [1], text="d0 d1 s0! s1! -> d0 d1 o0 o1"),
    call(
        aten.avg_pool2d.default,
        t(5, 8, 5),
        [2, 1],
        [],
        [0],
        True,
        False,
        3,
        text="d0 (o0 k0!) (o1 k1!) -> d0 o0 o1",
    ),
    call(aten.avg_pool3d.default, t(3, 6, 4, 2, 3), [2], text="d0 d1 (o0 k0!) (o1 k1!) s2! -> d0 d1 o0 o1 o2"),
    call(aten._adaptive_avg_pool2d.default, t(4, 5, 8, 3), [4, 2], text="d0 d1 (o0 k0!) s1! -> d0 d1 o0 o1"),
    call(aten._adaptive_avg_pool2d.default, t(5, 7, 5), [3, 5], text="d0 s0! (o1 k1!) -> d0 o0 o1"),
    call(aten._adaptive_avg_pool3d.default, t(6, 3, 4, 5), [2, 1, 3], text="d0 s0! (o1 k1!) s2! -> d0 o0 o1 o2"),
]

WINDOWS = [
    call(aten.im2col.default, t(3, 5, 4, 6), [2, 3], [1, 1], [0, 1], [1, 2], text="n c s0! s1! -> n (c k!) l!"),
    call(aten.im2col.default, t(6, 4, 4), [2, 2], [1, 1], [0, 0], [2, 2], text="c s0! s1! -> (c k!) l!"),
    call(
        aten.col2im.default,
        t(3, 20, 9),
        [4, 4],
        [2, 2],
        [1, 1],
        [0, 0],
        [1, 1],
        text="n (c k!) l! -> n c s0! s1!",
    ),
    call(aten.col2im.default, t(24, 4), [4, 4], [2, 2], [1, 1], [0, 0], [2, 2], text="(c k!) l! -> c s0! s1!"),
    call(aten.unfold.default, t(3, 8, 5), 1, 2, 2, text="d0 (n k!) d2 -> d0 n d2 k"),
    call(aten.unfold.default, t(3, 8, 5), -2, 3, 1, text="d0 s! d2 -> d0 n d2 k"),
    call(aten.unfold.default, t(7, 4), 0, 2, 2, text="s! d1 -> n d1 k"),
    call(aten.unfold.default, t(5), 0, 1, 1, text="(n k!) -> n k"),
    call(aten.unfold.default, t(), 0, 1, 1, text="-> k"),
]

nearest, bilinear = aten.upsample_nearest2d, aten.upsample_bilinear2d
bicubic, trilinear = aten.upsample_bicubic2d, aten.upsample_trilinear3d
FLAT, SOLID = "n c s0! s1! -> n c o0 o1", "n c s0! s1! s2! -> n c o0 o1 o2"

RESIZING = [
    call(nearest.vec, t(3, 5, 4, 3), None, [2.0, 1.5], text=FLAT),
    call(nearest.vec, t(1, 5, 4, 3), [5, 7], None, text=FLAT),
    call(bilinear.vec, t(3, 5, 4, 3), None, False, [2.0, 2.0], text=FLAT),
    call(bilinear.default, t(3, 5, 4, 3), [3, 5], True, text=FLAT),
    call(bicubic.default, t(3, 5, 4, 3), [3, 5], True, None, None, text=FLAT),
    call(trilinear.default, t(2, 4, 3, 2, 3), [4, 4, 4], True, text=SOLID),
    call(aten._upsample_bilinear2d_aa.default, t(3, 5, 8, 6), [4, 3], False, text=FLAT),
    call(aten._upsample_bicubic2d_aa.default, t(3, 5, 8, 6), [4, 3], False, text=FLAT),
    call(
        aten.grid_sampler_2d.default,
        t(3, 5, 4, 4),
        t(3, 6, 4, 2),
        0,
        0,
        False,
        text="n c s0! s1!, n o0 o1 x! -> n c o0 o1",
    ),
    call(
        aten.grid_sampler_2d.default,
        t(1, 4, 4, 3),
        t(1, 5, 1, 2),
        2,
        1,
        True,
        text="n c s0! s1!, n o0 o1 x! -> n c o0 o1",
    ),
    call(
        aten.grid_sampler_3d.default,
        t(2, 4, 3, 4, 3),
        t(2, 3, 4, 5, 3),
        1,
        2,
        False,
        text="n c s0! s1! s2!, n o0 o1 o2 x! -> n c o0 o1 o2",
    ),
]
