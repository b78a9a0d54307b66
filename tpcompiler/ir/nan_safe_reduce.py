"""Floats as integers of the same order, so that a max or min reduction over ranks keeps NaN.

gloo compares with `<`, and NCCL calls fmax and fmin: both can lose a NaN on one rank, and gloo can lose the largest
number with it. torch returns NaN. As an integer, NaN is above (for a minimum: below) all numbers, and any backend
reduces integers.
"""

from __future__ import annotations

import torch

INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}
EXTREMA = ("max", "min")


def is_lossy(op: str, dtype: torch.dtype) -> bool:
    """Return True if a backend may lose a NaN in this reduction."""
    return op in EXTREMA and dtype.is_floating_point


def sent_itemsize(op: str, itemsize: int) -> int:
    """Return the bytes that each element takes in a reduction over ranks: no backend reduces integers of two bytes."""
    is_half = itemsize == torch.half.itemsize
    return INTEGERS[_wide(torch.half)].itemsize if op in EXTREMA and is_half else itemsize


def encode(x: torch.Tensor, op: str) -> torch.Tensor:
    """Return integers in the order of `x`; NaN becomes the one that `op` ("max" or "min") prefers to all others."""
    wide = _wide(x.dtype)
    values = x if x.dtype == wide else x.to(wide)
    return torch.masked_fill(_mirror(values.view(INTEGERS[wide])), values.isnan(), _nan(op, INTEGERS[wide]))


def decode(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the floats that `encode` turned into `x`."""
    values = _mirror(x).view(_wide(dtype))
    return values if values.dtype == dtype else values.to(dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype in INTEGERS else torch.float32


def _nan(op: str, dtype: torch.dtype) -> int:
    """Return the bits of a NaN: the largest or smallest integer, which `_mirror` maps to -1."""
    limits = torch.iinfo(dtype)
    return limits.max if op == "max" else limits.min


def _mirror(bits: torch.Tensor) -> torch.Tensor:
    """Flip all bits of negative floats except the sign, so that they rise as their magnitude falls. Its own inverse."""
    sign = torch.bitwise_right_shift(bits, torch.iinfo(bits.dtype).bits - 1)
    return torch.bitwise_xor(bits, torch.bitwise_and(sign, torch.iinfo(bits.dtype).max))
