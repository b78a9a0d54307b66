"""Products: the contracted factor is summed; a fused bias is an addend."""

from __future__ import annotations

import torch
from torch import fx

from tpcompiler.ir import edit
from tpcompiler.rules.notation import RuleText
from tpcompiler.rules.pointwise import is_one
from tpcompiler.rules.registry import op_rule

aten = torch.ops.aten

BILINEAR = ((0,), (1,))


@op_rule(aten.linear.default, shards="any")
def linear(node: fx.Node) -> RuleText:
    """Batch dims pass through, k is summed: sharding k leaves Partial(sum); the bias is an addend."""
    operands = edit.operands(node)
    batch = " ".join(f"b{d}" for d in range(operands[0].meta["val"].ndim - 1))
    n = "n" if operands[1].meta["val"].ndim == 2 else ""  # a weight of one dim
    bias = ", +n" if len(operands) == 3 else ""
    return RuleText(f"{batch} k, {n} k{bias} -> {batch} {n}", linear=BILINEAR)


@op_rule(aten.mm.default, shards="any")
def mm(node: fx.Node) -> RuleText:
    """m k, k n -> m n"""
    return RuleText("m k, k n -> m n", linear=BILINEAR)


@op_rule(aten.bmm.default, shards="any")
def bmm(node: fx.Node) -> RuleText:
    """b m k, b k n -> b m n"""
    return RuleText("b m k, b k n -> b m n", linear=BILINEAR)


def _addend(shape: torch.Size, out: torch.Size, names: str) -> str:
    """The term of an addend that broadcasts into a product with these dims."""
    first = len(out) - len(shape)
    words = names.split()
    return " ".join(
        "1" if is_one(size) and not is_one(out[first + d]) else words[first + d] for d, size in enumerate(shape)
    )


@op_rule(aten.addmm.default, shards="any")
def addmm(node: fx.Node) -> RuleText:
    """+n, m k, k n -> m n, the first operand broadcast."""
    bias = _addend(edit.operands(node)[0].meta["val"].shape, node.meta["val"].shape, "m n")
    return RuleText(f"+{bias}, m k, k n -> m n", linear=((1,), (2,)))


@op_rule(aten.baddbmm.default, shards="any")
def baddbmm(node: fx.Node) -> RuleText:
    """+b m n, b m k, b k n -> b m n, the first operand broadcast."""
    bias = _addend(edit.operands(node)[0].meta["val"].shape, node.meta["val"].shape, "b m n")
    return RuleText(f"+{bias}, b m k, b k n -> b m n", linear=((1,), (2,)))


@op_rule(aten.matmul.default, shards="any")
def matmul(node: fx.Node) -> RuleText:
    """All forms of matmul: vectors on either side, batch dims that broadcast."""
    left, right = (o.meta["val"].shape for o in edit.operands(node))
    rows = ["m"] if len(left) > 1 else []
    columns = ["n"] if len(right) > 1 else []
    out = node.meta["val"].shape
    batch = len(out) - len(rows) - len(columns)

    def lead(shape: torch.Size) -> list[str]:
        count = max(len(shape) - 2, 0)
        first = batch - count
        return ["1" if is_one(shape[d]) and not is_one(out[first + d]) else f"b{first + d}" for d in range(count)]

    a = " ".join([*lead(left), *rows, "k"])
    b = " ".join([*lead(right), "k", *columns])
    return RuleText(f"{a}, {b} -> {' '.join([*(f'b{d}' for d in range(batch)), *rows, *columns])}", linear=BILINEAR)
