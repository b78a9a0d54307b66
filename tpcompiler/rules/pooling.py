"""Pooling over space: windows stay whole, images and channels are independent."""

from __future__ import annotations

import torch
from torch import fx

from tpcompiler.ir import edit
from tpcompiler.rules.notation import RuleText
from tpcompiler.rules.registry import op_rule

aten = torch.ops.aten

SPACE = {
    aten.max_pool2d_with_indices.default: 2,
    aten.max_pool3d_with_indices.default: 3,
    aten.avg_pool2d.default: 2,
    aten.avg_pool3d.default: 3,
    aten._adaptive_avg_pool2d.default: 2,
    aten._adaptive_avg_pool3d.default: 3,
}
MAXIMA = (aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default)


@op_rule(*SPACE, shards="nonempty")
def pool(node: fx.Node) -> RuleText:
    """ "d0 d1 s0! s1! -> d0 d1 o0 o1": a maximum's index counts within one image and channel. A mean is linear."""
    (operand,) = edit.operands(node)
    space = SPACE[node.target]  # type: ignore[index]
    free = " ".join(f"d{d}" for d in range(operand.meta["val"].ndim - space))
    taken = " ".join(f"s{d}!" for d in range(space))
    made = " ".join(f"o{d}" for d in range(space))
    parts = len(edit.outputs(node))
    return RuleText(
        f"{free} {taken} -> {', '.join([f'{free} {made}'] * parts)}", linear=() if node.target in MAXIMA else ((0,),)
    )
