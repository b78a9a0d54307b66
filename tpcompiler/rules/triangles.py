"""Triangles and diagonals: an element's position in both dims decides if it is kept."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from tpcompiler._torch import aten
from tpcompiler.ir import edit
from tpcompiler.rules.notation import RuleText, ShardRange
from tpcompiler.rules.registry import op_rule
from tpcompiler.rules.structure import dims_text


def _shift_triangle(lower: bool, sign: int) -> Callable[..., torch.Tensor]:
    """Return a body for a shard of rows (sign 1) or columns (sign -1), with the diagonal moved right (or left)."""

    def body(value: torch.Tensor, diagonal: int = 0, *, shard: ShardRange) -> torch.Tensor:
        rows, columns = (torch.arange(size, device=value.device) for size in value.shape[-2:])
        right = columns - rows.unsqueeze(-1) - diagonal  # distance from the diagonal, if this were the whole
        shift = shard.offset * sign
        return value.masked_fill(right > shift if lower else right < shift, 0)

    return body


@op_rule(aten.tril.default, aten.triu.default, shards="any")
def triangle(node: fx.Node) -> RuleText:
    """ "d0 r c -> d0 r c", with the diagonal moved by the shard's offset. Linear: elements are kept or dropped.

    A dynamic size stays whole, because a shard's offset would be no number.
    """
    shape = edit.shape(node)
    rows, columns = len(shape) - 2, len(shape) - 1
    lower = node.target is aten.tril.default
    fixed = {rows: _shift_triangle(lower, 1), columns: _shift_triangle(lower, -1)}
    fixed = {d: body for d, body in fixed.items() if isinstance(shape[d], int)}
    text = dims_text(len(shape), {rows, columns} - fixed.keys())
    return RuleText(f"{text} -> {text}", linear=((0,),), local={f"d{d}": body for d, body in fixed.items()})


@op_rule(aten.diagonal_scatter.default, shards="any")
def diagonal_scatter(node: fx.Node) -> RuleText:
    """ "d0! d1! d2, d2 k! -> d0! d1! d2": jointly linear, as the written values replace the old ones."""
    args = edit.arguments(node)
    ndim = edit.ndim(node)
    crossed = {args.dim1 % ndim, args.dim2 % ndim}
    text = dims_text(ndim, crossed)
    part = " ".join([*(f"d{d}" for d in range(ndim) if d not in crossed), "k!"])
    return RuleText(f"{text}, {part} -> {text}", linear=((0, 1),))
