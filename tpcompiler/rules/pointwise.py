"""Elementwise ops: every op that torch tags pointwise, and a few more."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from tpcompiler._torch import aten
from tpcompiler.ir import edit
from tpcompiler.ir.dim_sharding import Size
from tpcompiler.rules.infer import is_one
from tpcompiler.rules.notation import RuleText
from tpcompiler.rules.registry import op_rule, pointwise_rule


def broadcast(shape: Sequence[Size], names: Sequence[str], full: Sequence[Size]) -> str:
    """Return the term of a tensor of `shape` that broadcasts into dims with these names and sizes."""
    first = len(full) - len(shape)
    return " ".join(
        "1" if is_one(size) and not is_one(full[first + d]) else names[first + d] for d, size in enumerate(shape)
    )


def common_shape(shapes: Sequence[Sequence[Size]]) -> list[Size]:
    """Return the shape that these shapes broadcast to."""
    ndim = max(map(len, shapes))
    aligned = [[1] * (ndim - len(shape)) + list(shape) for shape in shapes]
    return [next((size for size in sizes if not is_one(size)), 1) for sizes in zip(*aligned, strict=True)]


@pointwise_rule
@op_rule(
    aten.copy.default,
    aten.full_like.default,
    aten.mish.default,
    aten.ones_like.default,
    aten.silu.default,
    shards="any",
)
def pointwise(node: fx.Node) -> str:
    """Operands broadcast from the right: "d0 d1, d1 -> d0 d1", "d0 1, d0 d1 -> d0 d1"."""
    results = edit.outputs(node)
    names = [f"d{d}" for d in range(results[0].ndim)]
    terms = (broadcast(edit.shape(operand), names, results[0].shape) for operand in edit.operands(node))
    return f"{', '.join(terms)} -> {', '.join([' '.join(names)] * len(results))}"


@op_rule(aten.add.Tensor, aten.sub.Tensor, shards="any")
def add(node: fx.Node) -> RuleText:
    """Jointly linear in both operands; with a number it is only affine, so nothing passes through."""
    return RuleText(pointwise(node), linear=((0, 1),) if len(edit.operands(node)) == 2 else ())


@op_rule(aten.mul.Tensor, aten.mul.Scalar, shards="any")
def mul(node: fx.Node) -> RuleText:
    """Linear in each operand separately: `mul(P, P)` is no sum of products."""
    return RuleText(pointwise(node), linear=tuple((i,) for i in range(len(edit.operands(node)))))


@op_rule(
    aten.neg.default,
    aten.div.Tensor,
    aten.div.Scalar,
    aten._conj.default,
    aten.conj_physical.default,
    aten.elu_backward.default,
    aten.gelu_backward.default,
    aten.hardshrink_backward.default,
    aten.hardsigmoid_backward.default,
    aten.hardswish_backward.default,
    aten.hardtanh_backward.default,
    aten.leaky_relu_backward.default,
    aten.mish_backward.default,
    aten.rrelu_with_noise_backward.default,
    aten.sigmoid_backward.default,
    aten.silu_backward.default,
    aten.softplus_backward.default,
    aten.softshrink_backward.default,
    aten.tanh_backward.default,
    aten.threshold_backward.default,
    aten.zeros_like.default,
    shards="any",
)
def scale(node: fx.Node) -> RuleText:
    """Linear in the first operand: a divisor is the same for every share, as is a slope; zeros are 0 times it."""
    return RuleText(pointwise(node), linear=((0,),))


@op_rule(aten.complex.default, aten.polar.default, shards="any")
def complex_number(node: fx.Node) -> RuleText | None:
    """Jointly linear in real and imaginary part; for polar, linear in the length, as all shares have the same angle."""
    return RuleText(pointwise(node), linear=((0, 1),) if node.target is aten.complex.default else ((0,),))


@op_rule(aten.where.self, shards="any")
def where(node: fx.Node) -> RuleText:
    """Jointly linear in the two alternatives: one condition selects from every share."""
    return RuleText(pointwise(node), linear=((1, 2),))


@op_rule(aten.masked_fill.Scalar, aten.masked_fill.Tensor, shards="any")
def masked_fill(node: fx.Node) -> RuleText:
    """Linear in the tensor and an uncast fill tensor (a cast would round shares), or in the tensor if the fill is 0."""
    tensor, *_, fill = (edit.fake(operand) for operand in edit.operands(node))
    if node.target is aten.masked_fill.Tensor:
        return RuleText(pointwise(node), linear=((0, 2),) if fill.dtype == tensor.dtype else ())
    value = edit.arguments(node).value
    return RuleText(pointwise(node), linear=((0,),) if isinstance(value, (int, float)) and value == 0 else ())


@op_rule(aten.rrelu_with_noise_functional.default, shards="any")
def rrelu(node: fx.Node) -> str | None:
    """Outside training the slope is one number, and the noise is returned unchanged."""
    return None if edit.arguments(node).training else pointwise(node)


@op_rule(
    aten.clone.default,
    aten._to_copy.default,
    aten.alias.default,
    aten.detach.default,
    aten.detach_copy.default,
    aten.contiguous.default,
    aten.lift_fresh_copy.default,
    aten.to.dtype,
    shards="any",
    relayout=True,
)
def cast(node: fx.Node) -> RuleText:
    """Copies and casts; a cast of a Partial would round every share, so it is reduced first."""
    same = edit.fake(edit.operands(node)[0]).dtype == edit.fake(node).dtype
    return RuleText(pointwise(node), linear=((0,),) if same else ())
