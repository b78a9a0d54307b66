"""Scaled dot-product attention: heads (and queries) are independent; keys and features meet in the softmax."""

from __future__ import annotations

import torch
from torch import fx

from tpcompiler.ir import edit
from tpcompiler.rules.pointwise import is_one
from tpcompiler.rules.registry import op_rule

aten = torch.ops.aten


@op_rule(aten.scaled_dot_product_attention.default)
def attention(node: fx.Node) -> str | None:
    """ "b (k g) s d!, b k t! d!, b k t! e -> b (k g) s e": grouped queries share a kv head.

    A mask broadcasts to [.., heads, s, t]. Under is_causal the queries are whole too, for their position counts.
    """
    args = edit.bound(node)
    if args["dropout_p"]:
        return None
    operands = edit.operands(node)
    q, k = operands[0].meta["val"].shape, operands[1].meta["val"].shape
    if any(o.meta["val"].ndim != len(q) for o in operands[1:3]):
        return None
    lead = [f"b{d}" for d in range(len(q) - 2)]
    queries, keys = list(lead), list(lead)
    if lead and args["enable_gqa"]:
        queries[-1], keys[-1] = "(h g)", "h"
    elif lead:
        queries[-1] = keys[-1] = "h"
    shared = -3 if args["enable_gqa"] else -2
    if any(
        is_one(a) != is_one(b) for o in operands[1:3] for a, b in zip(q[:shared], o.meta["val"].shape, strict=False)
    ):
        return None  # keys or values that broadcast over the batch or the heads
    s = "s!" if args["is_causal"] else "s"
    terms = [[*queries, s, "d!"], [*keys, "t!", "d!"], [*keys, "t!", "e"]]
    if len(operands) == 4:
        full = [*queries, s, "t!"]
        shape = operands[3].meta["val"].shape
        out = (*q[:-1], k[-2])
        first = len(full) - len(shape)
        terms.append(
            ["1" if is_one(size) and not is_one(out[first + d]) else full[first + d] for d, size in enumerate(shape)]
        )
    return f"{', '.join(' '.join(t) for t in terms)} -> {' '.join([*queries, s, 'e'])}"
