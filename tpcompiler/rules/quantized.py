"""Quantising and dequantising ops, as PT2E writes them: each number is independent."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from tpcompiler._torch import quantized_decomposed as quantized
from tpcompiler.ir import edit
from tpcompiler.rules.pointwise import pointwise
from tpcompiler.rules.registry import op_rule, op_variant
from tpcompiler.rules.variants import aminmax


@op_rule(
    quantized.quantize_per_tensor.default,
    quantized.quantize_per_tensor.tensor,
    quantized.dequantize_per_tensor.default,
    quantized.dequantize_per_tensor.tensor,
    quantized.quantize_per_token.default,
    quantized.dequantize_per_token.default,
    shards="any",
)
def per_tensor(node: fx.Node) -> str:
    """ "d0 d1, d0 1, d0 1 -> d0 d1": scale and zero point are one number, or one per row."""
    return pointwise(node)


@op_rule(quantized.quantize_per_channel.default, quantized.dequantize_per_channel.default, shards="any")
def per_channel(node: fx.Node) -> str:
    """ "d0 d1, d0, d0 -> d0 d1": one scale and one zero point per channel."""
    ndim = edit.ndim(node)
    term = " ".join(f"d{d}" for d in range(ndim))
    channel = f"d{edit.arguments(node).axis % ndim}"
    return f"{', '.join([term, *[channel] * (len(edit.operands(node)) - 1)])} -> {term}"


@op_rule(quantized.choose_qparams.tensor, quantized.choose_qparams_symmetric.tensor)
def choose(node: fx.Node) -> str:
    """ "d0! d1! -> 1, 1": one scale and one zero point for the whole tensor."""
    (x,) = edit.operands(node)
    return f"{' '.join(f'd{d}!' for d in range(edit.ndim(x)))} -> 1, 1"


@op_variant(quantized.choose_qparams.tensor)
def choose_by_extremes(x: torch.Tensor, *rest: Any) -> Any:
    """Choose from the least and the greatest number alone, which the ranks exchange in one collective."""
    return quantized.choose_qparams.tensor(torch.stack(aminmax(x)), *rest)


@op_variant(quantized.choose_qparams_symmetric.tensor)
def choose_symmetric_by_extremes(x: torch.Tensor, *rest: Any) -> Any:
    """Choose as `choose_by_extremes` does, symmetrically."""
    return quantized.choose_qparams_symmetric.tensor(torch.stack(aminmax(x)), *rest)
