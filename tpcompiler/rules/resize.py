"""Images resized and sampled: images and channels are independent, and each has its own space whole."""

from __future__ import annotations

from torch import fx

from tpcompiler._torch import aten
from tpcompiler.rules.notation import RuleText
from tpcompiler.rules.registry import op_rule

# The others are taken apart into look-ups along space, which leave images and channels as free.
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
    """ "n c s0! s1! -> n c o0 o1": what is made is a weighted sum of what is there, so it is linear."""
    if not all(isinstance(size, int) for size in node.meta["val"].shape[2:]):
        return None  # torch multiplies dynamic sizes by the scale as floats, and knows only those of the example
    space = range(node.meta["val"].ndim - 2)
    return RuleText(
        f"n c {' '.join(f's{d}!' for d in space)} -> n c {' '.join(f'o{d}' for d in space)}", linear=((0,),)
    )


@op_rule(aten.grid_sampler_2d.default, aten.grid_sampler_3d.default, shards="nonempty")
def grid_sampler(node: fx.Node) -> RuleText:
    """ "n c s0! s1!, n o0 o1 x! -> n c o0 o1": each point is looked up by itself, with weights of its own: linear."""
    space = range(node.meta["val"].ndim - 2)
    inside, made = " ".join(f"s{d}!" for d in space), " ".join(f"o{d}" for d in space)
    return RuleText(f"n c {inside}, n {made} x! -> n c {made}", linear=((0,),))
