"""Sums, means, extrema, and softmax."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from tpcompiler._torch import aten
from tpcompiler.ir import edit
from tpcompiler.rules.indexing import broadcast
from tpcompiler.rules.notation import RuleText, ShardRange
from tpcompiler.rules.registry import op_rule
from tpcompiler.rules.structure import dims_text

INF = float("inf")
NORMS = {0: "sum", 1: "sum", INF: "max", -INF: "min"}  # order of a norm -> the Partial that norms of shards are
NO_DIMS = (aten.any.dims, aten.all.dims)  # with an empty list they reduce nothing, all others everything


def _reduced(node: fx.Node, mark: str = "") -> tuple[str, list[str]]:
    """ "d0 d1 -> d0 1", once per output, and the reduced factors; `mark` is put behind these."""
    (operand,) = edit.operands(node)
    ndim = operand.meta["val"].ndim
    args = edit.bound(node)
    dims = args.get("dim")
    chosen = [dims] if isinstance(dims, int) else dims
    gone = {d % max(ndim, 1) for d in chosen or ()}
    if not chosen and (dims is None or node.target not in NO_DIMS):
        gone = set(range(ndim))
    taken = " ".join(f"d{d}{mark if d in gone else ''}" for d in range(ndim))
    kept = " ".join("1" if d in gone else f"d{d}" for d in range(ndim) if d not in gone or args.get("keepdim"))
    return f"{taken} -> {', '.join([kept] * len(edit.outputs(node)))}", [f"d{d}" for d in sorted(gone)]


def linear_cast(node: fx.Node) -> tuple[tuple[int, ...], ...]:
    """Linear in the one operand, but where `dtype=` drops fractions first: those of shares are not those of a sum."""
    (operand,) = edit.operands(node)
    drops = operand.meta["val"].is_floating_point() and not edit.outputs(node)[0].is_floating_point()
    return () if drops else ((0,),)


@op_rule(aten.sum.dim_IntList, aten.sum.default, shards="any")
def sum_(node: fx.Node) -> RuleText:
    """A reduced factor leaves Partial(sum)."""
    return RuleText(_reduced(node)[0], linear=linear_cast(node))


def _share_of_mean(value: torch.Tensor, *args: Any, shard: ShardRange, **kwargs: Any) -> torch.Tensor:
    mean = aten.mean.dim(value, *args, **kwargs) if args else aten.mean.default(value, **kwargs)
    share: torch.Tensor = mean * shard.fraction
    return share


@op_rule(aten.mean.dim, aten.mean.default, shards="nonempty")
def mean(node: fx.Node) -> RuleText:
    """Partial(sum) of each shard's share, because Partial(avg) is wrong for shards of different sizes."""
    text, gone = _reduced(node)
    return RuleText(text, linear=((0,),), local=dict.fromkeys(gone, _share_of_mean))


@op_rule(aten.prod.default, aten.prod.dim_int, shards="any")
def prod(node: fx.Node) -> RuleText:
    """A reduced factor leaves Partial(product); not linear, because the product of sums is not a sum of products."""
    return RuleText(_reduced(node)[0], reduce="product")


@op_rule(aten.amax.default, aten.max.default, aten.amin.default, aten.min.default, shards="nonempty")
def extremum(node: fx.Node) -> RuleText:
    """A reduced factor leaves Partial(max) or Partial(min); not linear."""
    largest = node.target in (aten.amax.default, aten.max.default)
    if edit.outputs(node)[0].dtype is torch.bool:
        return RuleText(_reduced(node, "!")[0])  # not all backends of torch.distributed reduce bools
    return RuleText(_reduced(node)[0], reduce="max" if largest else "min")


@op_rule(aten.aminmax.default, shards="nonempty")
def extrema(node: fx.Node) -> str:
    """ "d0 d1! -> d0, d0": both are of the whole dim, or exchanged in one collective by the variant."""
    return _reduced(node, "!")[0]


@op_rule(aten.linalg_vector_norm.default, shards="nonempty")
def vector_norm(node: fx.Node) -> RuleText:
    """Norms that a reduction makes of shards' norms; whole for a root of a sum. Never linear: |a + b| < |a| + |b|."""
    reduce = NORMS.get(edit.bound(node)["ord"])
    return RuleText(_reduced(node, "" if reduce else "!")[0], reduce=reduce or "sum")


@op_rule(aten._cdist_forward.default, shards="nonempty")
def distances(node: fx.Node) -> RuleText:
    """ "b0 m k!, b0 n k! -> b0 m n": of all rows from all others; k as in a norm, and as little linear."""
    full = node.meta["val"].shape
    batch = [f"b{d}" for d in range(len(full) - 2)]
    reduce = NORMS.get(edit.bound(node)["p"])
    terms = []
    for operand, row in zip(edit.operands(node), "mn", strict=True):
        outer = operand.meta["val"].shape[:-2]
        terms.append(f"{broadcast(outer, batch, full[:-2])} {row} k{'' if reduce else '!'}")
    return RuleText(f"{', '.join(terms)} -> {' '.join(batch)} m n", reduce=reduce or "sum")


@op_rule(
    aten.softmax.int,
    aten._softmax.default,
    aten._safe_softmax.default,
    aten.log_softmax.int,
    aten._log_softmax.default,
    shards="any",
)
def softmax(node: fx.Node) -> str:
    """ "d0 d1! -> d0 d1!": the dim that is normalised stays whole."""
    ndim = node.meta["val"].ndim
    text = dims_text(ndim, {edit.bound(node)["dim"] % ndim} if ndim else ())
    return f"{text} -> {text}"


@op_rule(
    aten.var.correction,
    aten.var_mean.correction,
    aten.any.default,
    aten.any.dim,
    aten.any.dims,
    aten.all.default,
    aten.all.dim,
    aten.all.dims,
    aten.argmax.default,
    aten.argmin.default,
    aten.max.dim,
    aten.min.dim,
    aten.median.default,
    aten.median.dim,
    aten.nanmedian.default,
    aten.nanmedian.dim,
    aten.mode.default,
    aten.kthvalue.default,
    shards="any",
)
def needs_whole(node: fx.Node) -> str:
    """Reductions without a Partial form here: what they reduce stays whole. A position counts within a line.

    `any` and `all` would leave Partial(max) and Partial(min) of bools, which not every backend reduces.
    """
    return _reduced(node, "!")[0]
