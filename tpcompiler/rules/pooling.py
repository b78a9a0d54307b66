"""Windows over space: images and channels are independent; space is whole, unless windows do not overlap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from tpcompiler._torch import OpOverload, aten
from tpcompiler.ir import edit
from tpcompiler.ir.dim_sharding import Size
from tpcompiler.ir.sizes import statically_equal, sym_quotient
from tpcompiler.rules.notation import Frame, RuleText, ShardRange, Window
from tpcompiler.rules.registry import op_rule
from tpcompiler.rules.structure import dims_text
from tpcompiler.rules.windows import arguments_of, in_rule, outside, padded, sliding

MEANS = {aten.avg_pool1d.default: 1, aten.avg_pool2d.default: 2, aten.avg_pool3d.default: 3}
MAXIMA = {aten.max_pool1d.default: 1, aten.max_pool2d.default: 2, aten.max_pool3d.default: 3}
# An index counts over the whole image, so a window's result depends on its position.
WITH_INDICES = {
    aten.max_pool2d_with_indices.default: 2,
    aten.max_pool3d_with_indices.default: 3,
    aten.adaptive_max_pool2d.default: 2,
    aten.adaptive_max_pool3d.default: 3,
}
ADAPTIVE = {aten._adaptive_avg_pool2d.default: 2, aten._adaptive_avg_pool3d.default: 3}


def per_dim(given: Sequence[int], space: int) -> list[int]:
    """Expand an argument with one number for all dims to one number per dim."""
    return list(given) * space if len(given) == 1 else list(given)


def side_by_side(source: Size, made: Size, kernel: int, stride: int, padding: int, dilation: int) -> bool:
    """Return True if windows tile a dim, so that it reads `(o k!)` and the windows are independent."""
    close = stride == kernel and padding == 0 and (dilation == 1 or kernel == 1)
    return close and statically_equal(source, made * kernel)


def _pooled(node: fx.Node, inside: Sequence[str], **besides: object) -> RuleText:
    """Return "d0 d1 .. -> d0 d1 o0 o1" with `inside` as the dims of space, for every output."""
    (operand,) = edit.operands(node)
    free = dims_text(edit.ndim(operand) - len(inside), ())
    result = f"{free} {' '.join(f'o{d}' for d in range(len(inside)))}"
    text = f"{free} {' '.join(inside)} -> {', '.join([result] * len(edit.outputs(node)))}"
    return RuleText(text, **besides)  # type: ignore[arg-type]


def windows(node: fx.Node, source: Sequence[Size], made: Sequence[Size]) -> list[str]:
    """Return the dims of space under the windows of a call: "(o0 k0!)" where they tile a dim, else "s0!"."""
    sizes = zip(source, made, *_steps(edit.bound(node), len(source)), strict=True)
    return [f"(o{d} k{d}!)" if side_by_side(*each) else f"s{d}!" for d, each in enumerate(sizes)]


def _steps(given: Mapping[str, Any], space: int) -> tuple[list[int], list[int], list[int], list[int]]:
    """Return the kernel, the stride, the padding and the dilation by dim of space."""
    kernel = per_dim(given["kernel_size"], space)
    stride, dilation = per_dim(given["stride"] or kernel, space), per_dim(given.get("dilation", [1]), space)
    return kernel, stride, per_dim(given["padding"], space), dilation


def _run_on_rows(op: OpOverload, space: int, *args: Any, shard: ShardRange, **kwargs: Any) -> torch.Tensor:
    """Run a pool on the rows that this rank's windows reach, padded where these are outside the image."""
    given = arguments_of(op, args, kwargs)
    x, (_, stride, padding, _) = given["self"], _steps(given, space)
    least = -float("inf") if x.is_floating_point() else torch.iinfo(x.dtype).min
    rows = padded(x, shard.frames, space, 0.0 if op in MEANS else least)
    given |= {"self": rows, "stride": stride, "padding": outside(shard.frames, padding)}
    result: torch.Tensor = op(**given)
    if op in MEANS and not given.get("divisor_override"):
        for frame in shard.frames:
            result = _counting_rows(result, frame, space, given, padding[frame.at])
    return result


def _counting_rows(
    result: torch.Tensor, frame: Frame, space: int, given: Mapping[str, Any], padding: int
) -> torch.Tensor:
    """Return means over the rows that count, of means over all rows of a window: no rows behind the padding do."""
    kernel, stride = (sizes[frame.at] for sizes in _steps(given, space)[:2])
    counted = padding if given["count_include_pad"] else 0
    before, behind = (min(missing, counted) for missing in (frame.before, frame.behind))
    if (before, behind) == (frame.before, frame.behind):
        return result
    total = (frame.size - 1) * stride + kernel
    rows = result.new_ones(total - frame.before - frame.behind + before + behind)
    rows = aten.constant_pad_nd.default(rows, [frame.before - before, frame.behind - behind])
    counts = rows.unfold(0, kernel, stride).sum(-1)
    scaled: torch.Tensor = result * (kernel / counts).view([-1] + [1] * (space - 1 - frame.at))
    return scaled


BODIES = {op: partial(_run_on_rows, op, space) for op, space in {**MEANS, **MAXIMA}.items()}


def equal_windows(source: Sequence[Size], made: Sequence[Size]) -> list[str]:
    """Return the dims of space under windows of equal size, which tile a dim if its size is a multiple of theirs."""
    tiled = (sym_quotient(size, count) is not None for size, count in zip(source, made, strict=True))
    return [f"(o{d} k{d}!)" if alone else f"s{d}!" for d, alone in enumerate(tiled)]


@op_rule(*MEANS, *MAXIMA, shards="nonempty")
def pool(node: fx.Node) -> RuleText:
    """ "d0 d1 (o0 k0!) s1! -> d0 d1 o0 o1" for windows that tile the first dim of space. A mean is linear.

    Other windows reach rows of other ranks, where "o1" is sharded.
    """
    (operand,) = edit.operands(node)
    space = {**MEANS, **MAXIMA}[node.target]
    source, made = (edit.shape(value)[-space:] for value in (operand, node))
    inside, reaching = windows(node, source, made), dict[str, Window]()
    for d, steps in enumerate(zip(*_steps(edit.bound(node), space), strict=True)):
        if inside[d] == f"s{d}!" and type(source[d]) is int and type(made[d]) is int:
            reaching[f"o{d}"] = sliding(f"s{d}", d, source[d], *steps)
    more = in_rule(reaching, BODIES[node.target])
    return _pooled(node, inside, linear=((0,),) if node.target in MEANS else (), **more)


@op_rule(*WITH_INDICES, shards="nonempty")
def pool_with_indices(node: fx.Node) -> RuleText:
    """ "d0 d1 s0! s1! -> d0 d1 o0 o1, d0 d1 o0 o1": an index counts within one image and channel."""
    return _pooled(node, [f"s{d}!" for d in range(WITH_INDICES[node.target])])


@op_rule(*ADAPTIVE, shards="nonempty")
def adaptive_pool(node: fx.Node) -> RuleText:
    """ "d0 d1 (o0 k0!) s1! -> d0 d1 o0 o1": windows tile a dim whose size is a multiple of the output's."""
    (operand,) = edit.operands(node)
    space = ADAPTIVE[node.target]
    inside = equal_windows(edit.shape(operand)[-space:], edit.shape(node)[-space:])
    sizes = {"output_size": tuple((f"o{d}",) for d in range(space))}
    return _pooled(node, inside, sizes=sizes, linear=((0,),))


@op_rule(aten.im2col.default, aten.col2im.default, shards="nonempty")
def columns(node: fx.Node) -> RuleText:
    """ "n c s0! s1! -> n (c k!) l", and back: each channel has its own rows of columns. Linear: it moves elements."""
    args = edit.arguments(node)
    batch = "n" if edit.ndim(node) == (3 if node.target is aten.im2col.default else 4) else ""
    image, rows = f"{batch} c s0! s1!", f"{batch} (c k!) l!"
    text = f"{image} -> {rows}" if node.target is aten.im2col.default else f"{rows} -> {image}"
    return RuleText(text, factors={"k": args.kernel_size[0] * args.kernel_size[-1]}, linear=((0,),))


@op_rule(aten.unfold.default, shards="nonempty")
def unfold(node: fx.Node) -> RuleText:
    """ "d0 (n k!) d2 -> d0 n d2 k" if windows tile the dim, else "d0 s! d2 -> d0 n d2 k". Linear: a view."""
    (operand,) = edit.operands(node)
    shape, args = edit.shape(operand), edit.arguments(node)
    if not shape:
        return RuleText("-> k", linear=((0,),))
    dim = args.dimension % len(shape)
    alone = side_by_side(shape[dim], edit.shape(node)[dim], args.size, args.step, 0, 1)
    names = [f"d{d}" for d in range(len(shape))]
    left, right = list(names), [*names, "k"]
    left[dim], right[dim] = "(n k!)" if alone else "s!", "n"
    return RuleText(f"{' '.join(left)} -> {' '.join(right)}", linear=((0,),))


@op_rule(aten.fractional_max_pool2d.default, aten.fractional_max_pool3d.default, shards="nonempty")
def fractional_pool(node: fx.Node) -> str:
    """ "n c s0! s1!, n c r! -> n c o0 o1": every channel has its own windows, at random positions."""
    value = edit.fake(edit.operands(node)[0])
    space = 2 if node.target is aten.fractional_max_pool2d.default else 3
    free = ["n", "c"][space + 2 - value.ndim :]
    inside, result = (" ".join(f"{letter}{d}!" for d in range(space)) for letter in "so")
    images = "n" if len(free) == 2 else "r0!"
    out = f"{' '.join(free)} {result}"
    return f"{' '.join(free)} {inside}, {images} c r! -> {out}, {out}"
