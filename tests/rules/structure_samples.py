"""Calls of ops that take dims apart, put them together, or move elements along them."""

from __future__ import annotations

import torch

from tests.rules.sample import call, distinct, t

aten = torch.ops.aten
END = 9223372036854775807

STRUCTURE = [
    call(aten.cat.default, [t(4, 3), t(4, 5), t(4, 1)], 1, text="d0 c0, d0 c1, d0 c2 -> d0 [c0 c1 c2]"),
    call(aten.cat.default, [distinct(3, 6), distinct(2, 6)], text="c0 d1, c1 d1 -> [c0 c1] d1"),
    call(aten.cat.default, [t(4, 5), t(4, 5), t(4, 5)], -1, text="d0 c, d0 c, d0 c -> d0 (n! c)"),
    call(aten.cat.default, [t(3, 1), t(3, 1)], 1, text="d0 c, d0 c -> d0 (n! c)"),
    call(aten.cat.default, [t(0), t(4, 3)], text="e0!, c1! d1 -> c! d1"),
    call(aten.cat.default, [t(4, 3), t(0), t(4, 5)], 1, text="d0 c0!, e1!, d0 c2! -> d0 c!"),
    call(aten.stack.default, [t(4, 5), t(4, 5)], -1, text="d0 d1, d0 d1 -> d0 d1 n!"),
    call(aten.stack.default, [distinct(6), distinct(6), distinct(6)], text="d0, d0, d0 -> n! d0"),
    call(aten.stack.default, [t(), t()], text=", -> n!"),
    call(aten.split.Tensor, t(4, 5), 2, -1, text="d0 d1! -> d0 c0, d0 c1, d0 c2"),
    call(aten.split.Tensor, t(4, 10), 5, -1, text="d0 (n! c) -> d0 c, d0 c"),
    call(aten.split_copy.Tensor, t(8, 3), 4, text="(n! c) d1 -> c d1, c d1"),
    call(aten.split_with_sizes.default, t(6, 4), [1, 5], text="[c0 c1] d1 -> c0 d1, c1 d1"),
    call(aten.split_with_sizes.default, t(12, 4), [4, 4, 4], text="(n! c) d1 -> c d1, c d1, c d1"),
    call(aten.split_with_sizes_copy.default, t(3, 10), [5, 5], 1, text="d0 (n! c) -> d0 c, d0 c"),
    call(aten.chunk.default, t(5, 6), 2, 1, text="d0 (n! c) -> d0 c, d0 c"),
    call(aten.chunk.default, t(7, 4), 3, text="d0! d1 -> c0 d1, c1 d1, c2 d1"),
    call(aten.unbind.int, t(4, 3, 5), 1, text="d0 d1! d2 -> d0 d2, d0 d2, d0 d2"),
    call(aten.unbind_copy.int, t(2, 5), text="d0! d1 -> d1, d1"),
    call(aten.slice.Tensor, t(4, 6), 1, 1, 5, 2, text="d0 d1! -> d0 c"),
    call(aten.slice.Tensor, t(4, 6), 1, 1, 5, text="d0 [_x c _z] -> d0 c"),
    call(aten.slice.Tensor, t(5, 6), 0, 0, 5, text="d0 d1 -> d0 d1"),
    call(aten.slice.Tensor, t(5, 6), 1, 0, END, text="d0 d1 -> d0 d1"),
    call(aten.slice.Tensor, t(5, 6), 0, None, -1, text="[c _z] d1 -> c d1"),
    call(aten.slice.Tensor, t(4, 5), 1, -2, text="d0 [_x c] -> d0 c"),
    call(aten.slice.Tensor, t(4, 10), 1, 0, 5, text="d0 [c _z] -> d0 c"),
    call(aten.slice.Tensor, t(4, 10), 1, 5, END, text="d0 [_x c] -> d0 c"),
    call(aten.slice.Tensor, t(9, 4), 0, -6, 6, text="[_x c _z] d1 -> c d1"),
    call(aten.slice.Tensor, t(9, 4), 0, 2, 5, text="[_x c _z] d1 -> c d1"),
    call(aten.slice.Tensor, t(4, 5), 1, 2, 3, text="d0 [_x c _z] -> d0 c"),
    call(aten.slice.Tensor, t(3, 10), -1, 0, END, 2, text="d0 (c k!) -> d0 c"),
    call(aten.slice.Tensor, t(15, 3), 0, 2, 15, 3, text="(c k!) d1 -> c d1"),
    call(aten.slice.Tensor, t(15, 3), 0, 3, END, 3, text="d0! d1 -> c d1"),
    call(aten.slice.Tensor, t(7, 3), 0, 0, END, 2, text="d0! d1 -> c d1"),
    call(aten.slice_copy.Tensor, t(5, 8), 1, 4, 8, text="d0 [_x c] -> d0 c"),
    call(aten.narrow_copy.default, t(5, 8), -1, 4, 3, text="d0 d1! -> d0 c"),
    call(aten.select.int, t(4, 5, 6), 1, -2, text="d0 d1! d2 -> d0 d2"),
    call(aten.select_copy.int, t(4), 0, 2, text="d0! ->"),
    call(aten.diagonal.default, t(4, 5, 6), 1, 0, -1, text="d0! d1 d2! -> d1 n"),
    call(aten.diagonal.default, t(4, 4), text="d0! d1! -> n"),
    call(aten.constant_pad_nd.default, t(4, 5, 6), [1, 2, 0, 0], text="d0 d1 d2! -> d0 d1 p2"),
    call(aten.constant_pad_nd.default, t(4, 5), [0, 0, -1, 3], 2.0, text="d0! d1 -> p0 d1"),
    call(aten.constant_pad_nd.default, t(4, 5), [0, 0], text="d0 d1 -> d0 d1"),
    call(aten.cumsum.default, t(4, 6), -1, text="d0 d1! -> d0 d1!"),
    call(aten.flip.default, t(4, 6, 8), [0, 2], text="d0! d1 d2! -> d0! d1 d2!"),
    call(aten.roll.default, t(4, 6), [1], [0], text="d0! d1 -> d0! d1"),
    call(aten.roll.default, t(4, 6), [3], text="d0! d1! -> d0! d1!"),
]
