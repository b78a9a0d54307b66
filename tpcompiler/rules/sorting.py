"""Sorting: a result depends on all elements of a line, so the dim stays whole."""

from __future__ import annotations

from torch import fx

from tpcompiler._torch import aten
from tpcompiler.ir import edit
from tpcompiler.rules.registry import op_rule
from tpcompiler.rules.scans import scan
from tpcompiler.rules.structure import dims_text

op_rule(aten.sort.default, aten.sort.stable, shards="any")(scan)


@op_rule(aten.topk.default, shards="any")
def topk(node: fx.Node) -> str:
    """ "d0 d1! -> d0 k, d0 k" """
    (operand,) = edit.operands(node)
    ndim = edit.ndim(operand)
    dim = edit.arguments(node).dim % ndim if ndim else 0
    result = " ".join("k" if d == dim else f"d{d}" for d in range(ndim))
    return f"{dims_text(ndim, {dim})} -> {result}, {result}"


def _lines(operand: fx.Node, last: str) -> str:
    """Return "d0 v": leading dims, and a name for the last one."""
    ndim = edit.ndim(operand)
    return " ".join([*(f"d{d}" for d in range(ndim - 1)), last])


@op_rule(aten.bucketize.Tensor, aten.searchsorted.Tensor, shards="any")
def searchsorted(node: fx.Node) -> str:
    """ "b!, d0 d1 -> d0 d1", or "d0 b!, d0 v -> d0 v" if every line has its own boundaries (and their order)."""
    first, second, *sorter = edit.operands(node)
    values, bounds = (first, second) if node.target is aten.bucketize.Tensor else (second, first)
    ndim = edit.ndim(values)
    if edit.ndim(bounds) == 1:
        bound, value = "b!", " ".join(f"d{d}" for d in range(ndim))
    else:
        bound, value = _lines(bounds, "b!"), _lines(values, "v")
    terms = [value, bound] if node.target is aten.bucketize.Tensor else [bound, value]
    return f"{', '.join([*terms, *([bound] if sorter else [])])} -> {value}"


@op_rule(aten.histc.default, shards="any")
def histc(node: fx.Node) -> str:
    """ "d0 d1 -> b": the shards' counts add up, provided the range is given and not taken from the data."""
    args = edit.arguments(node)
    has_range = args.min < args.max
    ndim = edit.ndim(edit.operands(node)[0])
    return f"{dims_text(ndim, () if has_range else range(ndim))} -> b"
