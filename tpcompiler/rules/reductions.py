"""Sums, means, extrema, and softmax."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from tpcompiler._torch import aten
from tpcompiler.ir import edit
from tpcompiler.rules.notation import RuleText, ShardRange
from tpcompiler.rules.pointwise import broadcast, common_shape
from tpcompiler.rules.registry import op_rule
from tpcompiler.rules.structure import dims_text

INF = float("inf")
NORMS = {0: "sum", 1: "sum", INF: "max", -INF: "min"}  # order of a norm -> the Partial left by norms of shards
NO_DIMS = (aten.any.dims, aten.all.dims)  # an empty list makes these reduce nothing, and all other ops everything


def _text_and_reduced_dims(node: fx.Node, mark: str = "") -> tuple[str, list[str]]:
    """Return "d0 d1 -> d0 1", one term per output, and the reduced factors, which get the suffix `mark`."""
    (operand,) = edit.operands(node)
    ndim = edit.ndim(operand)
    args = edit.bound(node)
    dims = args.get("dim")
    dim_list = [dims] if isinstance(dims, int) else dims
    gone = {d % max(ndim, 1) for d in dim_list or ()}
    if not dim_list and (dims is None or node.target not in NO_DIMS):
        gone = set(range(ndim))
    operand_term = " ".join(f"d{d}{mark if d in gone else ''}" for d in range(ndim))
    output_term = " ".join("1" if d in gone else f"d{d}" for d in range(ndim) if d not in gone or args.get("keepdim"))
    return f"{operand_term} -> {', '.join([output_term] * len(edit.outputs(node)))}", [f"d{d}" for d in sorted(gone)]


def linear_cast(node: fx.Node) -> tuple[tuple[int, ...], ...]:
    """Return linearity in the one operand, unless `dtype=` first drops fractions: truncated shares do not add up."""
    (operand,) = edit.operands(node)
    drops = edit.fake(operand).is_floating_point() and not edit.outputs(node)[0].is_floating_point()
    return () if drops else ((0,),)


@op_rule(aten.sum.dim_IntList, aten.sum.default, shards="any")
def sum_(node: fx.Node) -> RuleText:
    """A reduced factor leaves Partial(sum)."""
    return RuleText(_text_and_reduced_dims(node)[0], linear=linear_cast(node))


def _share_of_mean(value: torch.Tensor, *args: Any, shard: ShardRange, **kwargs: Any) -> torch.Tensor:
    mean = aten.mean.dim(value, *args, **kwargs) if args else aten.mean.default(value, **kwargs)
    share: torch.Tensor = mean * shard.fraction
    return share


@op_rule(aten.mean.dim, aten.mean.default, shards="nonempty")
def mean(node: fx.Node) -> RuleText:
    """Leave Partial(sum) of weighted shares, because Partial(avg) is wrong for shards of different sizes."""
    text, gone = _text_and_reduced_dims(node)
    return RuleText(text, linear=((0,),), local=dict.fromkeys(gone, _share_of_mean))


@op_rule(aten.prod.default, aten.prod.dim_int, shards="any")
def prod(node: fx.Node) -> RuleText:
    """A reduced factor leaves Partial(product); not linear, because a product of sums is no sum of products."""
    return RuleText(_text_and_reduced_dims(node)[0], reduce="product")


@op_rule(aten.amax.default, aten.max.default, aten.amin.default, aten.min.default, shards="nonempty")
def extremum(node: fx.Node) -> RuleText:
    """A reduced factor leaves Partial(max) or Partial(min); not linear."""
    largest = node.target in (aten.amax.default, aten.max.default)
    if edit.outputs(node)[0].dtype is torch.bool:
        return RuleText(_text_and_reduced_dims(node, "!")[0])  # not all backends of torch.distributed reduce bools
    return RuleText(_text_and_reduced_dims(node)[0], reduce="max" if largest else "min")


@op_rule(aten.aminmax.default, shards="nonempty")
def extrema(node: fx.Node) -> str:
    """ "d0 d1! -> d0, d0": the dim stays whole; the variant exchanges both in one collective instead."""
    return _text_and_reduced_dims(node, "!")[0]


@op_rule(aten.linalg_vector_norm.default, shards="nonempty")
def vector_norm(node: fx.Node) -> RuleText:
    """Orders that reduce norms of shards leave Partial; roots of sums stay whole. Never linear: |a + b| < |a| + |b|."""
    reduce = NORMS.get(edit.arguments(node).ord)
    return RuleText(_text_and_reduced_dims(node, "" if reduce else "!")[0], reduce=reduce or "sum")


@op_rule(aten._cdist_forward.default, shards="nonempty")
def distances(node: fx.Node) -> RuleText:
    """ "b0 m k!, b0 n k! -> b0 m n": from all rows to all rows; k behaves as in a norm."""
    full = edit.shape(node)
    batch = [f"b{d}" for d in range(len(full) - 2)]
    reduce = NORMS.get(edit.arguments(node).p)
    terms = []
    for operand, row in zip(edit.operands(node), "mn", strict=True):
        outer = edit.shape(operand)[:-2]
        terms.append(f"{broadcast(outer, batch, full[:-2])} {row} k{'' if reduce else '!'}")
    return RuleText(f"{', '.join(terms)} -> {' '.join(batch)} m n", reduce=reduce or "sum")


@op_rule(aten.dist.default, shards="nonempty")
def distance(node: fx.Node) -> RuleText:
    """ "d0! d1!, d1! ->": the norm of the difference; operands broadcast, and all dims behave as in a norm."""
    reduce = NORMS.get(edit.arguments(node).p)
    shapes = [edit.shape(operand) for operand in edit.operands(node)]
    full = common_shape(shapes)
    names = [f"d{d}{'' if reduce else '!'}" for d in range(len(full))]
    return RuleText(f"{', '.join(broadcast(shape, names, full) for shape in shapes)} ->", reduce=reduce or "sum")


@op_rule(aten._pdist_forward.default, shards="any")
def pair_distances(node: fx.Node) -> RuleText:
    """ "n! k! -> q!": from every row to every later one, so rows stay whole; k behaves as in a norm."""
    reduce = NORMS.get(edit.bound(node)["p"])
    return RuleText(f"n! k{'' if reduce else '!'} -> q!", reduce=reduce or "sum")


@op_rule(
    aten.softmax.int,
    aten._softmax.default,
    aten._safe_softmax.default,
    aten.log_softmax.int,
    aten._log_softmax.default,
    shards="any",
)
def softmax(node: fx.Node) -> str:
    """ "d0 d1! -> d0 d1!", once for each result: the dim stays whole."""
    ndim = edit.ndim(edit.operands(node)[0])
    text = dims_text(ndim, {edit.arguments(node).dim % ndim} if ndim else ())
    return f"{text} -> {', '.join([text] * len(edit.outputs(node)))}"


@op_rule(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default, shards="any")
def softmax_backward(node: fx.Node) -> RuleText:
    """ "d0 d1!, d0 d1! -> d0 d1!": linear in the gradient, as the forward's result is given."""
    text = softmax(node)
    return RuleText(f"{text.partition(' -> ')[0]}, {text}", linear=((0,),))


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
    """Reductions without a Partial form here: the reduced dims stay whole. A position counts within a line.

    `any` and `all` would leave Partial(max) and Partial(min) of bools, which not every backend reduces.
    """
    return _text_and_reduced_dims(node, "!")[0]
