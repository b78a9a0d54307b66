"""Normalisations: what they average over stays whole."""

from __future__ import annotations

import torch
from torch import fx

from tpcompiler.ir import edit
from tpcompiler.rules.registry import op_rule

aten = torch.ops.aten


@op_rule(aten.layer_norm.default, aten.native_layer_norm.default, aten.rms_norm.default, shards="any")
def layer_norm(node: fx.Node) -> str:
    """ "d0 h!, h!, h! -> d0 h!", beside the kept statistics of the native form."""
    operands = edit.operands(node)
    ndim = operands[0].meta["val"].ndim
    inner = len(edit.bound(node)["normalized_shape"])
    outer = [f"d{d}" for d in range(ndim - inner)]
    normed = [f"h{d}!" for d in range(inner)]
    terms = [" ".join(outer + normed)] + [" ".join(normed)] * (len(operands) - 1)
    made = [" ".join(outer + normed)] + [" ".join(outer + ["1"] * inner)] * (len(edit.outputs(node)) - 1)
    return f"{', '.join(terms)} -> {', '.join(made)}"


@op_rule(aten._native_batch_norm_legit_functional.default, aten._native_batch_norm_legit_no_training.default)
def batch_norm(node: fx.Node) -> str:
    """ "n! c s0!, c, .. -> n! c s0!, c, ..": channels are independent; the batch is whole in training."""
    operands = edit.operands(node)
    space = " ".join(f"s{d}!" for d in range(operands[0].meta["val"].ndim - 2))
    training = node.target is aten._native_batch_norm_legit_functional.default
    batch = "n!" if training else "n"
    made = [f"{batch} c {space}"] + ["c" if training else "z!"] * (len(edit.outputs(node)) - 1)
    return f"{batch} c {space}, {', '.join(['c'] * (len(operands) - 1))} -> {', '.join(made)}"
