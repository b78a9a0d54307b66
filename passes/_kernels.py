"""Attention kernels: those that also return the log-sum-exp of each query's scores, and those that take groups."""

from __future__ import annotations

from typing import Any

from torch import fx

from tpcompiler._torch import OpOverload, aten
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


def reads_of_groups(node: fx.Node, device_type: str) -> int:
    """Return how often a call of attention reads keys and values, if groups of query heads share theirs.

    On a CPU every query head reads them by itself. On a GPU kernels without a mask read them once; none takes a mask
    too, so that torch repeats the heads: they are read, written repeated, and read again.
    """
    args = edit.bound(node)
    times = int(edit.shape(args["query"])[-3]) // int(edit.shape(args["key"])[-3]) if args["enable_gqa"] else 1
    if times == 1 or device_type == "cpu":
        return times
    return 1 if args["attn_mask"] is None else 1 + 2 * times
