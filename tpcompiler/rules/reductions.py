"""Sums, means, extrema, and softmax."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from tpcompiler.ir import edit
from tpcompiler.rules.notation import RuleText, ShardRange
from tpcompiler.rules.registry import op_rule
from tpcompiler.rules.structure import dims_text

aten = torch.ops.aten


def _reduced(node: fx.Node) -> tuple[str, list[str]]:
    """ "d0 d1 -> d0 1" and the reduced factors."""
    (operand,) = edit.operands(node)
    ndim = operand.meta["val"].ndim
    args = edit.bound(node)
    dims = args.get("dim")
    chosen = [dims] if isinstance(dims, int) else dims
    gone = {d % max(ndim, 1) for d in chosen} if chosen else set(range(ndim))
    kept = ("1" if d in gone else f"d{d}" for d in range(ndim) if d not in gone or args.get("keepdim"))
    return f"{dims_text(ndim, ())} -> {' '.join(kept)}", [f"d{d}" for d in sorted(gone)]


@op_rule(aten.sum.dim_IntList, aten.sum.default, shards="any")
def sum_(node: fx.Node) -> RuleText:
    """A reduced factor leaves Partial(sum)."""
    return RuleText(_reduced(node)[0], linear=((0,),))


def _share_of_mean(value: torch.Tensor, *args: Any, shard: ShardRange, **kwargs: Any) -> torch.Tensor:
    mean = aten.mean.dim(value, *args, **kwargs) if args else aten.mean.default(value, **kwargs)
    share: torch.Tensor = mean * shard.fraction
    return share


@op_rule(aten.mean.dim, aten.mean.default, shards="nonempty")
def mean(node: fx.Node) -> RuleText:
    """Partial(sum) of each shard's share, because Partial(avg) is wrong for shards of different sizes."""
    text, gone = _reduced(node)
    return RuleText(text, linear=((0,),), local=dict.fromkeys(gone, _share_of_mean))


@op_rule(aten.amax.default, aten.amin.default, shards="nonempty")
def extremum(node: fx.Node) -> RuleText:
    """A reduced factor leaves Partial(max) or Partial(min)."""
    return RuleText(_reduced(node)[0], reduce="max" if node.target is aten.amax.default else "min")


@op_rule(aten.softmax.int, aten._softmax.default, aten.log_softmax.int, aten._log_softmax.default, shards="any")
def softmax(node: fx.Node) -> str:
    """ "d0 d1! -> d0 d1!": the dim that is normalised stays whole."""
    ndim = node.meta["val"].ndim
    text = dims_text(ndim, {edit.bound(node)["dim"] % ndim} if ndim else ())
    return f"{text} -> {text}"


@op_rule(
    aten.var.correction,
    aten.any.dim,
    aten.all.dim,
    aten.argmax.default,
    aten.argmin.default,
    aten.linalg_vector_norm.default,
    shards="any",
)
def needs_whole(node: fx.Node) -> str:
    """Reductions without a Partial form here: what they reduce stays whole."""
    text, gone = _reduced(node)
    for factor in gone:
        text = " ".join(f"{word}!" if word == factor else word for word in text.split(" "))
    return text
