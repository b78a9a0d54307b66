"""Resizing and sampling: images and channels are independent; pixels need their neighbours, or all of their image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from tpcompiler._torch import OpOverload, aten, no_python_dispatcher
from tpcompiler.ir import edit
from tpcompiler.rules.notation import RuleText, ShardRange
from tpcompiler.rules.registry import op_rule
from tpcompiler.rules.windows import arguments_of, between, in_rule, repeating, trimmed

# All others are decomposed into look-ups along space, which leave images and channels free too.
UPSAMPLE = (
    aten.upsample_nearest2d.vec,
    aten.upsample_bilinear2d.default,
    aten.upsample_bilinear2d.vec,
    aten.upsample_trilinear3d.default,
    aten.upsample_bicubic2d.default,
    aten._upsample_bilinear2d_aa.default,
    aten._upsample_bicubic2d_aa.default,
)


NEAREST = {aten.upsample_nearest2d.vec: aten.upsample_nearest2d.default}
LINEAR = {
    aten.upsample_bilinear2d.default: aten.upsample_bilinear2d.default,
    aten.upsample_bilinear2d.vec: aten.upsample_bilinear2d.default,
    aten.upsample_trilinear3d.default: aten.upsample_trilinear3d.default,
}


def _run_on_rows(op: OpOverload, times: Sequence[int], *args: Any, shard: ShardRange, **kwargs: Any) -> torch.Tensor:
    """Enlarge the rows that this rank's share of the result is near, and keep the share."""
    given = arguments_of(op, args, kwargs)
    x, space = given["input" if "input" in given else "self"], len(times)
    scales = _scales(given, space)
    sizes = given["output_size"] or [int(size * by) for size, by in zip(x.shape[2:], scales, strict=True)]
    in_frames = {frame.at for frame in shard.frames}
    sizes = [x.shape[2 + at] * times[at] if at in in_frames else size for at, size in enumerate(sizes)]
    corners = [given["align_corners"]] if op in LINEAR else []
    with no_python_dispatcher():  # which would write the op as look-ups
        result: torch.Tensor = {**NEAREST, **LINEAR}[op](x, sizes, *corners, *scales)
    starts = [frame.place - times[frame.at] * frame.before for frame in shard.frames]
    return trimmed(result, shard.frames, space, starts)


def _scales(given: Mapping[str, Any], space: int) -> Sequence[float | None]:
    return given.get("scale_factors") or [given.get(f"scales_{axis}") for axis in "dhw"[3 - space :]]


def _whole_times(node: fx.Node) -> list[int]:
    """Return by dim of space how many times it grows; 0 if that is no whole number, or places depend on all rows."""
    args, space = edit.bound(node), edit.ndim(node) - 2
    if node.target not in (*NEAREST, *LINEAR) or args.get("align_corners"):
        return [0] * space
    source, made = (edit.shape(value)[2:] for value in (edit.operands(node)[0], node))
    pairs = zip(source, made, _scales(args, space), strict=True)
    return [
        big // small if type(small) is int and small and big % small == 0 and scale in (None, big / small) else 0
        for small, big, scale in pairs
    ]


@op_rule(*UPSAMPLE, shards="nonempty")
def upsample(node: fx.Node) -> RuleText | None:
    """ "n c s0! s1! -> n c o0 o1": every output is a weighted sum of inputs, so the op is linear.

    Where a dim grows by a whole number of times, a share of "o1" needs rows that are near it.
    """
    if not all(isinstance(size, int) for size in edit.shape(node)[2:]):
        return None  # torch multiplies dynamic sizes by the scale as floats, and knows only the example's sizes
    space = range(edit.ndim(node) - 2)
    text = f"n c {' '.join(f's{d}!' for d in space)} -> n c {' '.join(f'o{d}' for d in space)}"
    times, source = _whole_times(node), edit.shape(edit.operands(node)[0])[2:]
    near = repeating if node.target in NEAREST else between
    windows = {f"o{d}": near(f"s{d}", d, source[d], count) for d, count in enumerate(times) if count}
    return RuleText(text, linear=((0,),), **in_rule(windows, partial(_run_on_rows, node.target, times)))  # type: ignore[arg-type]


@op_rule(aten.grid_sampler_2d.default, aten.grid_sampler_3d.default, shards="nonempty")
def grid_sampler(node: fx.Node) -> RuleText:
    """ "n c s0! s1!, n o0 o1 x! -> n c o0 o1": each point is looked up independently, with its own weights: linear."""
    space = range(edit.ndim(node) - 2)
    inside, outside = " ".join(f"s{d}!" for d in space), " ".join(f"o{d}" for d in space)
    return RuleText(f"n c {inside}, n {outside} x! -> n c {outside}", linear=((0,),))
