"""Normalisations: the averaged dims stay whole, without linearity; the ops are jointly linear in scale and shift."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from tpcompiler._torch import aten
from tpcompiler.ir import edit
from tpcompiler.rules.notation import RuleText, ShardRange
from tpcompiler.rules.registry import op_rule


@op_rule(
    aten.layer_norm.default,
    aten.native_layer_norm.default,
    aten.rms_norm.default,
    aten._fused_rms_norm.default,
    shards="any",
)
def layer_norm(node: fx.Node) -> RuleText:
    """ "d0 h!, h!, h! -> d0 h!", and the statistics of the native form."""
    operands = edit.operands(node)
    ndim = edit.ndim(operands[0])
    inner = len(edit.arguments(node).normalized_shape)
    outer = [f"d{d}" for d in range(ndim - inner)]
    normed = [f"h{d}!" for d in range(inner)]
    terms = [" ".join(outer + normed)] + [" ".join(normed)] * (len(operands) - 1)
    results = [" ".join(outer + normed)] + [" ".join(outer + ["1"] * inner)] * (len(edit.outputs(node)) - 1)
    return RuleText(f"{', '.join(terms)} -> {', '.join(results)}", linear=_affine(node))


def _affine(node: fx.Node) -> tuple[tuple[int, ...], ...]:
    """Return joint linearity in scale and shift if there are both a scale and no statistics, else none.

    A shift alone is added to a value that is not pending.
    """
    scaled = edit.arguments(node).weight is not None and len(edit.outputs(node)) == 1
    return (tuple(range(1, len(edit.operands(node)))),) if scaled else ()


def _groups(value: torch.Tensor, *args: Any, shard: ShardRange, **kwargs: Any) -> torch.Tensor:
    """Normalise the shard's own groups."""
    normed: torch.Tensor = aten.group_norm.default(value, shard.size, *args[1:], **kwargs)
    return normed


def _native_groups(
    value: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    images: int,
    channels: int,
    pixels: int,
    groups: int,
    eps: float,
    *,
    shard: ShardRange,
) -> tuple[torch.Tensor, ...]:
    """Run the native form on fewer images or groups; its size arguments must match the shard."""
    n, c = value.shape[:2]
    own = groups * c // channels
    results: tuple[torch.Tensor, ...] = aten.native_group_norm.default(value, weight, bias, n, c, pixels, own, eps)
    return results


@op_rule(aten.group_norm.default, aten.native_group_norm.default, shards="any")
def group_norm(node: fx.Node) -> RuleText:
    """ "n (g c!) s0!, (g c!), (g c!) -> n (g c!) s0!": images and groups of channels are independent."""
    operands = edit.operands(node)
    args = edit.arguments(node)
    native = node.target is aten.native_group_norm.default
    space = " ".join(f"s{d}!" for d in range(edit.ndim(operands[0]) - 2))
    term = f"n (g c!) {space}"
    terms = [term] + ["(g c!)"] * (len(operands) - 1)
    results = [term, "n g", "n g"] if native else [term]
    groups = args.group if native else args.num_groups
    local = {"n": _native_groups, "g": _native_groups} if native else {"g": _groups}
    return RuleText(
        f"{', '.join(terms)} -> {', '.join(results)}", factors={"g": groups}, local=local, linear=_affine(node)
    )


@op_rule(
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_no_training.default,
)
def batch_norm(node: fx.Node) -> str:
    """ "n! c s0!, c, .. -> n! c s0!, c, ..": channels are independent; in training the batch is whole."""
    operands = edit.operands(node)
    space = " ".join(f"s{d}!" for d in range(edit.ndim(operands[0]) - 2))
    training = node.target is not aten._native_batch_norm_legit_no_training.default
    batch = "n!" if training else "n"
    results = [f"{batch} c {space}"] + ["c" if training else "z!"] * (len(edit.outputs(node)) - 1)
    return f"{batch} c {space}{', c' * (len(operands) - 1)} -> {', '.join(results)}"
