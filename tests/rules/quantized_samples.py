"""Calls of PT2E's ops."""

from __future__ import annotations

import torch

from tests.rules.sample import call, ids, t

aten = torch.ops.aten
pt2e = torch.ops.quantized_decomposed

BYTE = (-128, 127, torch.int8)


def narrow(*shape: int) -> torch.Tensor:
    return t(*shape).float()


def small(*shape: int) -> torch.Tensor:
    """Scales."""
    return narrow(*shape).abs() / 50 + 0.01


def byte(*shape: int) -> torch.Tensor:
    return ids(*shape, below=256).sub(128).to(torch.int8)


QUANTIZED = [
    call(pt2e.quantize_per_tensor.default, narrow(4, 6), 0.02, 3, *BYTE, text="d0 d1 -> d0 d1"),
    call(pt2e.dequantize_per_tensor.default, byte(5, 4), 0.02, 3, *BYTE, text="d0 d1 -> d0 d1"),
    call(pt2e.quantize_per_tensor.tensor, narrow(4, 5), small(), ids(below=9), *BYTE, text="d0 d1,, -> d0 d1"),
    call(pt2e.dequantize_per_tensor.tensor, byte(4, 5), small(1), ids(1, below=9), *BYTE, text="d0 d1, 1, 1 -> d0 d1"),
    call(
        pt2e.quantize_per_token.default,
        narrow(4, 6),
        small(4, 1),
        ids(4, 1, below=9),
        *BYTE,
        text="d0 d1, d0 1, d0 1 -> d0 d1",
    ),
    call(
        pt2e.dequantize_per_token.default,
        byte(3, 4, 6),
        small(3, 4, 1),
        ids(3, 4, 1, below=9),
        *BYTE,
        torch.float32,
        text="d0 d1 d2, d0 d1 1, d0 d1 1 -> d0 d1 d2",
    ),
    call(
        pt2e.quantize_per_channel.default,
        narrow(4, 6),
        small(6),
        ids(6, below=9),
        1,
        *BYTE,
        text="d0 d1, d1, d1 -> d0 d1",
    ),
    call(
        pt2e.dequantize_per_channel.default,
        byte(4, 6),
        small(4),
        ids(4, below=9),
        0,
        *BYTE,
        text="d0 d1, d0, d0 -> d0 d1",
    ),
    call(pt2e.dequantize_per_channel.default, byte(5, 3), small(5), None, -2, *BYTE, text="d0 d1, d0 -> d0 d1"),
    call(pt2e.choose_qparams.tensor, narrow(4, 6), *BYTE[:2], 1e-6, torch.int8, text="d0! d1! -> 1, 1"),
    call(pt2e.choose_qparams_symmetric.tensor, narrow(5), *BYTE[:2], 1e-6, torch.int8, text="d0! -> 1, 1"),
    call(
        aten._weight_int8pack_mm.default,
        (ids(4, 6, below=9) - 4).float(),
        byte(5, 6),
        small(5).exp2(),
        text="m k, n k, n -> m n",
    ),
    call(  # 128 rows: whether half of 192 could be cut depends on the CPU
        aten._weight_int4pack_mm_for_cpu.default,
        (ids(3, 64, below=9) - 4).float(),
        aten._convert_weight_to_int4pack_for_cpu(ids(128, 64, below=16).int(), 1),
        32,
        (ids(2, 128, 2, below=9) - 4).float(),
        text="m k!, (n n_!) p!, g! (n n_!) s! -> m (n n_!)",
    ),
]
