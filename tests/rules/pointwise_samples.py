"""Calls of elementwise ops that are more than elementwise: selections, complex numbers, scalar overloads."""

from __future__ import annotations

import torch

from tests.rules.sample import call, distinct, flags, ids, t

aten = torch.ops.aten

ELEMENTWISE = [
    call(aten.where.self, flags(4, 5), t(4, 5), t(5), text="d0 d1, d0 d1, d1 -> d0 d1"),
    call(aten.where.self, flags(4, 5), t(4, 5), distinct(4, 1), text="d0 d1, d0 d1, d0 1 -> d0 d1"),
    call(aten.masked_fill.Scalar, t(4, 6), flags(6), 0, text="d0 d1, d1 -> d0 d1"),
    call(aten.masked_fill.Scalar, t(4), flags(6, 4), 0.0, text="d1, d0 d1 -> d0 d1"),
    call(aten.masked_fill.Tensor, distinct(6, 4), flags(4), torch.tensor(2), text="d0 d1, d1, -> d0 d1"),
    call(aten.masked_fill.Tensor, t(6, 4), flags(4), torch.tensor(2), text="d0 d1, d1, -> d0 d1"),
    call(aten.complex.default, t(4, 5), t(5), text="d0 d1, d1 -> d0 d1"),
    call(aten.polar.default, t(4, 5).abs(), t(4, 5), text="d0 d1, d0 d1 -> d0 d1"),
    call(aten._conj.default, torch.complex(t(4, 5), t(4, 5)), text="d0 d1 -> d0 d1"),
    call(aten.conj_physical.default, torch.complex(t(6), t(6)), text="d0 -> d0"),
    call(aten.mul.Tensor, torch.complex(t(4, 5), t(4, 5)), torch.complex(t(5), t(5)), text="d0 d1, d1 -> d0 d1"),
    call(aten.abs.default, torch.complex(t(4, 5), t(4, 5)), text="d0 d1 -> d0 d1"),
    call(aten.addcmul.default, t(5), t(4, 5), t(4, 1), value=2, text="d1, d0 d1, d0 1 -> d0 d1"),
    call(aten.addcdiv.default, t(4, 5), t(4, 5), t(), text="d0 d1, d0 d1, -> d0 d1"),
    call(aten.lerp.Scalar, t(4, 5), t(5), 0.3, text="d0 d1, d1 -> d0 d1"),
    call(aten.lerp.Tensor, t(4, 1), t(5), t(), text="d0 1, d1, -> d0 d1"),
    call(aten.div.Tensor_mode, t(4, 5), t(5), rounding_mode="floor", text="d0 d1, d1 -> d0 d1"),
    call(aten.bitwise_and.Tensor, ids(4, 5, below=9), ids(4, 1, below=9), text="d0 d1, d0 1 -> d0 d1"),
    call(aten.bitwise_not.default, flags(6), text="d0 -> d0"),
    call(aten.__lshift__.Scalar, ids(4, 5, below=9), 2, text="d0 d1 -> d0 d1"),
    call(aten.logical_and.default, flags(4, 5), flags(4, 5), text="d0 d1, d0 d1 -> d0 d1"),
    call(aten.pow.Scalar, 2.0, t(4, 5), text="d0 d1 -> d0 d1"),
    call(aten.rsub.Scalar, t(4, 5), 1.0, 2, text="d0 d1 -> d0 d1"),
    call(aten.fmod.Tensor, t(5), t(4, 5), text="d1, d0 d1 -> d0 d1"),
    call(aten.clamp.default, t(4, 5), 0, text="d0 d1 -> d0 d1"),
    call(aten.xlogy.Scalar_Other, t(4, 5), 2.0, text="d0 d1 -> d0 d1"),
    call(aten.heaviside.default, t(4, 5), t(1, 1), text="d0 d1, 1 1 -> d0 d1"),
    call(aten.rrelu_with_noise_functional.default, t(4, 5), t(4, 5), text="d0 d1, d0 d1 -> d0 d1, d0 d1"),
    call(aten.rrelu_with_noise_functional.default, t(4), t(4), 0.1, 0.3, True, text=None),
    call(aten.detach_copy.default, t(4, 5), text="d0 d1 -> d0 d1"),
    call(aten._to_copy.default, t(4, 6), dtype=torch.float64, text="d0 d1 -> d0 d1"),
]
