"""Attention kernels: those that also return the log-sum-exp of each query's scores, and those that take groups."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from tpcompiler._torch import OpOverload, aten, sym_hint
from tpcompiler.ir import edit
from tpcompiler.ir.node_placement import read_claim

ON_CPU = aten._scaled_dot_product_flash_attention_for_cpu.default
ON_CUDA = aten._scaled_dot_product_efficient_attention.default
# Required multiples: steps of queries (log-sum-exps may be padded to it), steps of keys, features.
MULTIPLES = {"cpu": (1, 1, 1), "cuda": (32, 8, 8)}

Call = tuple[OpOverload, tuple[Any, ...], dict[str, Any]]


def kernel_for(node: fx.Node, device_type: str) -> Call | None:
    """Return the equivalent call on a device type, for a call of another device's kernel; None for any other call."""
    if node.target is ON_CPU and device_type == "cuda":
        return _on_cuda(node)
    return _on_cpu(node) if node.target is ON_CUDA and device_type == "cpu" else None


def _on_cuda(node: fx.Node) -> Call:
    args = edit.arguments(node)
    positional = (
        args.query,
        args.key,
        args.value,
        args.attn_mask,
        True,
        args.dropout_p,
        args.is_causal,
    )
    return ON_CUDA, positional, {"scale": args.scale}


def _on_cpu(node: fx.Node) -> Call | None:
    """Return the call on the CPU; None if the program already had the CUDA kernel, whose claim has its own results."""
    if len(read_claim(node).sharding or ()) != len(ON_CPU._schema.returns):
        return None
    args = edit.arguments(node)
    positional = (args.query, args.key, args.value, args.dropout_p, args.is_causal)
    return ON_CPU, positional, {"attn_mask": args.attn_bias, "scale": args.scale}


def read_again(node: fx.Node, device_type: str) -> int:
    """Return the bytes that a call of attention moves because query heads share heads of keys and values.

    On a CPU every query head reads its keys by itself. On a GPU the kernels without a mask take groups. For groups with
    a mask torch repeats the heads: it writes them, and reads them again.
    """
    args = edit.bound(node)
    keys, values = edit.fake(args["key"]), edit.fake(args["value"])
    times = int(edit.shape(args["query"])[-3]) // int(keys.shape[-3]) if args["enable_gqa"] else 1
    repeated = times * sum(sym_hint(each.numel()) * each.element_size() for each in (keys, values))
    if device_type == "cpu":
        return int(repeated) - sum(map(bytes_in_memory, (keys, values)))
    return 2 * int(repeated) if times > 1 and args["attn_mask"] is not None else 0


def bytes_in_memory(value: torch.Tensor) -> int:
    """Return the bytes that a value takes in memory, where an expanded dim occurs once."""
    sizes = (sym_hint(size) for size, stride in zip(value.shape, value.stride(), strict=True) if sym_hint(stride))
    return int(math.prod(sizes)) * value.element_size()
