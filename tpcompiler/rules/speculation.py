"""Calls that are safe where the single-device program does not run them: in the branch of a `cond` that is not chosen.

Such a call has no effect, and no value of its operands makes it raise. Ops are listed by name; a call of any other op
stays in its branch.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from tpcompiler._torch import HigherOrderOperator, OpOverload
from tpcompiler.ir import edit
from tpcompiler.ir.control_flow import copy_with_bodies, is_cond
from tpcompiler.ir.draws import draws
from tpcompiler.ir.text import op_name
from tpcompiler.rules.index_range import Ranges, is_within, positions_of
from tpcompiler.rules.registry import rule_of

# Ops, apart from pointwise ones, that no value of their operands makes raise.
_NAMES = """
_adaptive_avg_pool2d _adaptive_avg_pool3d _fused_rms_norm _log_softmax _native_batch_norm_legit_no_training
_safe_softmax _softmax _to_copy _unsafe_view addbmm addmm addmv alias all amax amin aminmax any arange argmax
argmin avg_pool1d avg_pool2d avg_pool3d baddbmm bmm cat chunk clone constant_pad_nd contiguous conv1d conv2d conv3d
conv_transpose1d conv_transpose2d conv_transpose3d convolution copy cummax cummin cumprod cumsum detach diagonal
einsum empty expand flatten flip full full_like group_norm layer_norm lift_fresh_copy linear log_softmax
logcumsumexp masked_fill matmul max max_pool1d max_pool2d max_pool2d_with_indices max_pool3d mean min mm movedim
narrow native_group_norm native_layer_norm ones ones_like permute prod repeat reshape rms_norm roll
scaled_dot_product_attention scalar_tensor select select_scatter slice slice_scatter softmax sort split
split_with_sizes squeeze stack sum sym_size sym_numel t tensordot to topk transpose tril triu unbind unflatten
unfold unsqueeze upsample_bicubic2d upsample_bilinear2d upsample_nearest2d var var_mean view view_as_complex
view_as_real zeros zeros_like
"""
_TOTAL = frozenset(_NAMES.split())
_DIVISIONS = ("div", "floor_divide", "remainder", "fmod")  # integer division raises for zero
_OF_SIZES = (operator.getitem, operator.add, operator.sub, operator.mul, operator.neg)


def obstacle(nodes: Iterable[fx.Node], at_door: Ranges) -> str:
    """Return the reason why these calls must stay where the program runs them, or "".

    `at_door`: the ranges that the program requires of inputs in any case.
    """
    return next((why for node in nodes if node.op == "call_function" and (why := _why(node, at_door))), "")


def _why(node: fx.Node, at_door: Ranges) -> str:
    target: Any = node.target
    if is_cond(node):
        return next(filter(None, map(_in_body, node.args[1:3])), "")
    if isinstance(target, HigherOrderOperator):
        return f"calls {target}"
    if not isinstance(target, OpOverload):
        return "" if target in _OF_SIZES else f"computes {op_name(node)} of sizes"
    if target._schema.is_mutable:
        return f"writes in place ({op_name(node)})"
    if draws(node):
        return f"draws random numbers ({op_name(node)})"
    if "assert" in str(target):
        return f"asserts ({op_name(node)})"
    name = target.overloadpacket.__name__
    if node.meta.get("unbacked_bindings") or not (edit.outputs(node) or name.startswith("sym_")):
        return f"makes a size or a number of data ({op_name(node)})"
    rule = rule_of(node)
    if rule is not None and rule.positions:
        positions = list(positions_of(node, rule))
        if len(positions) == len(rule.positions) and all(is_within(i, ends, at_door) for i, ends in positions):
            return ""
        return f"looks up positions that may be outside of the dim ({op_name(node)})"
    if target.namespace != "aten" or not (name in _TOTAL or torch.Tag.pointwise in target.tags):
        return f"calls an op that some values may make raise ({op_name(node)})"
    results = edit.outputs(node)
    if name in _DIVISIONS and results and not (results[0].is_floating_point() or results[0].is_complex()):
        divisor = edit.arguments(node).other
        if isinstance(divisor, fx.Node) or not divisor:
            return f"divides integers by what may be zero ({op_name(node)})"
    return ""


def _in_body(named: Any) -> str:
    # Without ranges: the body's inputs may share names with the program's.
    return obstacle(copy_with_bodies(edit.fake(named)).nodes, {})
