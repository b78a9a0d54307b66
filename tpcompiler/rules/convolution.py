"""Convolutions: input channels are summed, groups are independent, and space under a window is whole."""

from __future__ import annotations

from torch import fx

from tpcompiler._torch import aten
from tpcompiler.ir import edit
from tpcompiler.rules.matmul import BILINEAR
from tpcompiler.rules.notation import RuleText
from tpcompiler.rules.pooling import per_dim, side_by_side
from tpcompiler.rules.registry import op_rule

TRANSPOSED = (aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input)


@op_rule(
    aten.convolution.default,
    aten.conv1d.default,
    aten.conv2d.default,
    aten.conv3d.default,
    aten.conv1d.padding,
    aten.conv2d.padding,
    aten.conv3d.padding,
    *TRANSPOSED,
    shards="nonempty",
)
def convolution(node: fx.Node) -> RuleText:
    """ "n (g i) s0!, (g o) i k0!, +(g o) -> n (g o) o0"; a transposed one has "(g i) o k0!" in the middle.

    Without groups, channels are "i" and "o". Windows that tile a dim are independent: "(o0 k0!)".
    """
    args = edit.bound(node)
    operands = edit.operands(node)
    weight = edit.shape(operands[1])
    space = len(weight) - 2
    transposed = node.target in TRANSPOSED or bool(args.get("transposed"))
    grouped = args["groups"] > 1
    in_channels, out_channels = ("(g i)", "(g o)") if grouped else ("i", "o")
    first = f"{in_channels} o" if transposed else f"{out_channels} i"
    batch = "n " * (edit.ndim(operands[0]) - space - 1)
    inside = [f"s{d}!" for d in range(space)]
    if not transposed and not isinstance(args["padding"], str):
        steps = (per_dim(args[name], space) for name in ("stride", "padding", "dilation"))
        shapes = (value.shape[-space:] for value in (edit.fake(operands[0]), edit.fake(node)))
        for d, sizes in enumerate(zip(*shapes, weight[2:], *steps, strict=True)):
            if side_by_side(*sizes):
                inside[d] = f"(o{d} k{d}!)"
    kernel = " ".join(f"k{d}!" for d in range(space))
    outside = " ".join(f"o{d}" for d in range(space))
    bias = f", +{out_channels}" if len(operands) == 3 else ""
    text = f"{batch}{in_channels} {' '.join(inside)}, {first} {kernel}{bias} -> {batch}{out_channels} {outside}"
    if not grouped:
        return RuleText(text, linear=BILINEAR)
    return RuleText(text, factors={"g": args["groups"]}, linear=BILINEAR, counts={"groups": (("g",),)})


@op_rule(aten.conv_tbc.default, shards="nonempty")
def conv_tbc(node: fx.Node) -> RuleText:
    """ "s! n i, k! i o, +o -> t n o": steps before the batch, channels last."""
    return RuleText("s! n i, k! i o, +o -> t n o", linear=BILINEAR)
