"""Resizing and sampling: images and channels are independent, and each has its space whole."""

from __future__ import annotations

from torch import fx

from tpcompiler._torch import aten
from tpcompiler.ir import edit
from tpcompiler.rules.notation import RuleText
from tpcompiler.rules.registry import op_rule

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


@op_rule(*UPSAMPLE, shards="nonempty")
def upsample(node: fx.Node) -> RuleText | None:
    """ "n c s0! s1! -> n c o0 o1": every output is a weighted sum of inputs, so the op is linear."""
    if not all(isinstance(size, int) for size in edit.shape(node)[2:]):
        return None  # torch multiplies dynamic sizes by the scale as floats, and knows only the example's sizes
    space = range(edit.ndim(node) - 2)
    return RuleText(
        f"n c {' '.join(f's{d}!' for d in space)} -> n c {' '.join(f'o{d}' for d in space)}", linear=((0,),)
    )


@op_rule(aten.grid_sampler_2d.default, aten.grid_sampler_3d.default, shards="nonempty")
def grid_sampler(node: fx.Node) -> RuleText:
    """ "n c s0! s1!, n o0 o1 x! -> n c o0 o1": each point is looked up independently, with its own weights: linear."""
    space = range(edit.ndim(node) - 2)
    inside, outside = " ".join(f"s{d}!" for d in space), " ".join(f"o{d}" for d in space)
    return RuleText(f"n c {inside}, n {outside} x! -> n c {outside}", linear=((0,),))
