"""Ops that take dims apart or put them together; the dim that they work on stays whole."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

from tpcompiler.ir import edit
from tpcompiler.rules.notation import RuleText
from tpcompiler.rules.registry import op_rule

aten = torch.ops.aten


def dims_text(ndim: int, whole: Collection[int], prefix: str = "d") -> str:
    """ "d0 d1! d2": the dims of a tensor, those in `whole` marked."""
    return " ".join(f"{prefix}{d}{'!' if d in whole else ''}" for d in range(ndim))


@op_rule(aten.cat.default, shards="any")
def cat(node: fx.Node) -> RuleText | None:
    """The dim that grows is whole and has its own factor on each operand."""
    operands = [o.meta["val"] for o in edit.operands(node)]
    ndim = node.meta["val"].ndim
    if any(o.ndim != ndim for o in operands):
        return None  # the legacy form with an empty 1-d tensor
    dim = edit.bound(node)["dim"] % ndim
    terms = [" ".join(f"c{i}!" if d == dim else f"d{d}" for d in range(ndim)) for i in range(len(operands))]
    out = " ".join("c!" if d == dim else f"d{d}" for d in range(ndim))
    return RuleText(f"{', '.join(terms)} -> {out}", linear=(tuple(range(len(operands))),))


@op_rule(aten.stack.default, shards="any")
def stack(node: fx.Node) -> RuleText:
    """ "d0 d1, d0 d1 -> d0 n! d1": the operands' dims beside a new one that numbers them."""
    operands = edit.operands(node)
    ndim = node.meta["val"].ndim
    dims = [f"d{d}" for d in range(ndim - 1)]
    made = list(dims)
    made.insert(edit.bound(node)["dim"] % ndim, "n!")
    terms = ", ".join([" ".join(dims)] * len(operands))
    return RuleText(f"{terms} -> {' '.join(made)}", linear=(tuple(range(len(operands))),))


@op_rule(aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default, aten.unbind.int, shards="any")
def split(node: fx.Node) -> RuleText:
    """Every part has its own factor on the split dim; unbind drops it."""
    (operand,) = edit.operands(node)
    ndim = operand.meta["val"].ndim
    dim = edit.bound(node)["dim"] % ndim
    parts = []
    for i in range(len(edit.outputs(node))):
        names = [f"c{i}" if d == dim else f"d{d}" for d in range(ndim)]
        parts.append(" ".join(n for d, n in enumerate(names) if d != dim or node.target is not aten.unbind.int))
    return RuleText(f"{dims_text(ndim, {dim})} -> {', '.join(parts)}", linear=((0,),))


@op_rule(aten.slice.Tensor, shards="any")
def slice_(node: fx.Node) -> RuleText:
    """A slice of everything keeps its dim; any other needs it whole."""
    (operand,) = edit.operands(node)
    args = edit.bound(node)
    ndim = operand.meta["val"].ndim
    dim = args["dim"] % ndim
    end = args["end"]
    size = operand.meta["val"].shape[dim]
    to_the_end = end is None or (isinstance(end, int) and end >= (size if isinstance(size, int) else 2**62))
    if args["start"] in (None, 0) and args["step"] == 1 and to_the_end:
        # An end given as the size would cut nothing on a shorter shard either.
        return RuleText(f"{dims_text(ndim, ())} -> {dims_text(ndim, ())}", linear=((0,),))
    out = " ".join("c" if d == dim else f"d{d}" for d in range(ndim))
    return RuleText(f"{dims_text(ndim, {dim})} -> {out}", linear=((0,),))


@op_rule(aten.select.int, shards="any")
def select(node: fx.Node) -> RuleText:
    """The dim that is selected from is whole, and gone."""
    (operand,) = edit.operands(node)
    ndim = operand.meta["val"].ndim
    dim = edit.bound(node)["dim"] % ndim
    out = " ".join(f"d{d}" for d in range(ndim) if d != dim)
    return RuleText(f"{dims_text(ndim, {dim})} -> {out}", linear=((0,),))


@op_rule(aten.flip.default, aten.roll.default)
def in_place_dims(node: fx.Node) -> str:
    """The dims along which elements meet are whole (all of them for a roll without dims)."""
    ndim = node.meta["val"].ndim
    args = edit.bound(node)
    dims = args["dims"]
    whole = {d % ndim for d in dims} if dims and ndim else set(range(ndim))
    return f"{dims_text(ndim, whole)} -> {dims_text(ndim, whole)}"
