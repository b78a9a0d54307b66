"""Calls of the less usual views: copies, repetitions, other readings of the same bits."""

from __future__ import annotations

import torch

from tests.rules.sample import call, distinct, t

aten = torch.ops.aten


def z(*shape: int) -> torch.Tensor:
    return torch.view_as_complex(t(*shape, 2))


VIEWS_2 = [
    call(aten.view_copy.default, t(3, 24), [3, -1, 4], text="f0 (f1 f2) -> f0 f1 f2"),
    call(aten.permute_copy.default, t(3, 4, 5), [-1, 0, 1], text="d0 d1 d2 -> d2 d0 d1"),
    call(aten.repeat.default, t(4, 5), [1, 3], text="d0 d1 -> d0 (r1! d1)"),
    call(aten.repeat.default, t(4, 5), [2, 1, 1], text="d1 d2 -> n0! d1 d2"),
    call(aten.repeat.default, t(4, 1, 3), [2, 3, 4, 1], text="d1 1 d3 -> n0! (r1! d1) n2! d3"),
    call(aten.repeat.default, t(1, 5), [1, 1, 1], text="d1 d2 -> n0! d1 d2"),
    call(aten.repeat.default, t(), [3, 2], text="-> n0! n1!"),
    call(aten.repeat.default, t(), [], text="->"),
    call(aten.view_as_real.default, z(4, 5), text="d0 d1 -> d0 d1 p!"),
    call(aten.view_as_real.default, z(), text="-> p!"),
    call(aten.view_as_complex.default, t(4, 5, 2), text="d0 d1 p! -> d0 d1"),
    call(aten.view_as_complex.default, t(2), text="p! ->"),
    call(aten.view.dtype, t(4, 5), torch.int64, text="d0 d1 -> d0 d1"),
    call(aten.view.dtype, t(4, 5), torch.int16, text="d0 d1 -> d0 (d1 p!)"),
    call(aten.view.dtype, distinct(4, 12).int(), torch.int64, text="d0 (d1 p!) -> d0 d1"),
    call(aten.view.dtype, t(), torch.int64, text="->"),
    call(aten.view_copy.dtype, distinct(3, 10).short(), torch.int8, text="d0 d1 -> d0 (d1 p!)"),
]
