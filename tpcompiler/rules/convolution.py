"""Convolutions: input channels are summed, groups are independent, and windows reach rows of neighbours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from tpcompiler._torch import OpOverload, aten
from tpcompiler.ir import edit
from tpcompiler.rules.matmul import BILINEAR
from tpcompiler.rules.notation import Frame, RuleText, ShardRange, Window
from tpcompiler.rules.pooling import per_dim, side_by_side
from tpcompiler.rules.registry import op_rule
from tpcompiler.rules.windows import arguments_of, in_rule, outside, padded, sliding, spreading, trimmed

PLAIN = (
    aten.convolution.default,
    aten.conv1d.default,
    aten.conv2d.default,
    aten.conv3d.default,
    aten.conv1d.padding,
    aten.conv2d.padding,
    aten.conv3d.padding,
)
TRANSPOSED = (aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input)


def _run_on_rows(op: OpOverload, *args: Any, shard: ShardRange, **kwargs: Any) -> torch.Tensor:
    """Run a convolution on the rows that this rank's windows reach, padded where these are outside the image."""
    given = arguments_of(op, args, kwargs)
    x, weight, bias = given["input"], given["weight"], given["bias"]
    space = weight.ndim - 2
    stride, dilation = (per_dim(given[name], space) for name in ("stride", "dilation"))
    if _is_transposed(op, given):
        sizes = (outside(shard.frames, per_dim(given[name], space)) for name in ("padding", "output_padding"))
        run = (aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input)[space - 1]
        spread: torch.Tensor = run(padded(x, shard.frames, space), weight, bias, stride, *sizes, 1, dilation)
        return trimmed(spread, shard.frames, space, [frame.place for frame in shard.frames])
    before, behind = _padding(given, weight.shape[2:])
    apart = {at for at in range(space) if before[at] != behind[at]} - {frame.at for frame in shard.frames}
    frames = [*shard.frames, *(Frame(at, 0, 0, before[at], behind[at]) for at in sorted(apart))]
    x = padded(x, frames, space)
    groups = x.shape[-space - 1] // weight.shape[1]  # of this rank
    run = (aten.conv1d, aten.conv2d, aten.conv3d)[space - 1].default  # takes one image too
    result: torch.Tensor = run(x, weight, bias, stride, outside(frames, before), dilation, groups)
    return result


def _is_transposed(op: OpOverload, given: Mapping[str, Any]) -> bool:
    return op in TRANSPOSED or bool(given.get("transposed"))


def _padding(given: Mapping[str, Any], kernel: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the rows of padding before and behind each dim of space."""
    space, padding = len(kernel), given["padding"]
    if isinstance(padding, str):
        extra = zip(per_dim(given["dilation"], space), kernel, strict=True)
        total = [by * (size - 1) if padding == "same" else 0 for by, size in extra]
        return [each // 2 for each in total], [each - each // 2 for each in total]
    return per_dim(padding, space), per_dim(padding, space)


BODIES = {op: partial(_run_on_rows, op) for op in (*PLAIN, *TRANSPOSED)}


@op_rule(*PLAIN, *TRANSPOSED, shards="nonempty")
def convolution(node: fx.Node) -> RuleText:
    """ "n (g i) s0!, (g o) i k0!, +(g o) -> n (g o) o0"; a transposed one has "(g i) o k0!" in the middle.

    Without groups, channels are "i" and "o". Windows that tile a dim are independent: "(o0 k0!)". Others reach rows of
    other ranks, where "o0" is sharded.
    """
    args = edit.bound(node)
    operands = edit.operands(node)
    weight = edit.shape(operands[1])
    space = len(weight) - 2
    transposed = _is_transposed(node.target, args)  # type: ignore[arg-type]
    grouped = args["groups"] > 1
    in_channels, out_channels = ("(g i)", "(g o)") if grouped else ("i", "o")
    first = f"{in_channels} o" if transposed else f"{out_channels} i"
    batch = "n " * (edit.ndim(operands[0]) - space - 1)
    inside, windows = [f"s{d}!" for d in range(space)], dict[str, Window]()
    before, behind = _padding(args, weight[2:])
    stride, dilation = (per_dim(args[name], space) for name in ("stride", "dilation"))
    source, made = (value.shape[-space:] for value in (edit.fake(operands[0]), edit.fake(node)))
    for d in range(space):
        shape, steps = (source[d], made[d], weight[2 + d]), (stride[d], before[d] + behind[d], dilation[d])
        if not transposed and side_by_side(*shape, *steps):
            inside[d] = f"(o{d} k{d}!)"
        elif all(type(size) is int for size in shape):
            how = f"s{d}", d, source[d], weight[2 + d], stride[d], before[d], dilation[d]
            if not transposed:
                windows[f"o{d}"] = sliding(*how)
            elif not grouped and dilation[d] * (weight[2 + d] - 1) + 1 >= stride[d]:  # no gaps in the result
                windows[f"o{d}"] = spreading(*how)
    kernel = " ".join(f"k{d}!" for d in range(space))
    results = " ".join(f"o{d}" for d in range(space))
    bias = f", +{out_channels}" if len(operands) == 3 else ""
    text = f"{batch}{in_channels} {' '.join(inside)}, {first} {kernel}{bias} -> {batch}{out_channels} {results}"
    more = in_rule(windows, BODIES[node.target])
    if not grouped:
        return RuleText(text, linear=BILINEAR, **more)
    return RuleText(text, factors={"g": args["groups"]}, linear=BILINEAR, counts={"groups": (("g",),)}, **more)


@op_rule(aten.conv_tbc.default, shards="nonempty")
def conv_tbc(node: fx.Node) -> RuleText:
    """ "s! n i, k! i o, +o -> t n o": steps before the batch, channels last."""
    return RuleText("s! n i, k! i o, +o -> t n o", linear=BILINEAR)
