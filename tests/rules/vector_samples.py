"""Calls of ops on vectors along a dim."""

from __future__ import annotations

import torch

from tests.rules.sample import call, t

aten = torch.ops.aten

VECTORS = [
    call(aten.linalg_cross.default, t(4, 3, 6), t(4, 3, 6), dim=1, text="d0 d1! d2, d0 d1! d2 -> d0 d1! d2"),
    call(aten.linalg_cross.default, t(5, 3), t(1, 3), text="d0 d1!, 1 d1! -> d0 d1!"),
    call(aten.linalg_cross.default, t(3), t(3), text="d0!, d0! -> d0!"),
    call(aten.renorm.default, t(4, 6, 5), 2, 1, 1.5, text="d0! d1 d2! -> d0! d1 d2!"),
    call(aten.renorm.default, t(6, 4), 1, -2, 1.0, text="d0 d1! -> d0 d1!"),
    call(aten.trace.default, t(4, 6), text="d0! d1! ->"),
]
