"""Scaled dot-product attention: heads (and queries) are independent; keys and features meet in the softmax."""

from __future__ import annotations

import torch
from torch import fx

from tpcompiler._torch import statically_equal, sym_quotient
from tpcompiler.ir import edit
from tpcompiler.rules.notation import RuleText
from tpcompiler.rules.pointwise import broadcast
from tpcompiler.rules.registry import op_rule

aten = torch.ops.aten

KERNELS = (
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
)


@op_rule(aten.scaled_dot_product_attention.default, *KERNELS, shards="nonempty")
def attention(node: fx.Node) -> RuleText | None:
    """ "b0 (h g) s d!, b0 h t! d!, b0 h t! e -> b0 (h g) s e": grouped queries share a kv head; linear in the values.

    Batch dims and heads of one element broadcast, and a mask to [.., heads, s, t]. Under is_causal the queries are
    whole too, for their position counts. A kernel's form also gives the sums of its rows, padded, and wants e as d.
    """
    args = edit.bound(node)
    if args["dropout_p"] or args.get("return_debug_mask"):
        return None
    q, k, v, *mask = (operand.meta["val"].shape for operand in edit.operands(node))
    kernel = node.target in KERNELS
    out, *others = edit.outputs(node)
    shared = out.shape[:-2]  # batch dims and heads
    heads = [f"b{d}" for d in range(len(shared) - 1)] + ["h"] * bool(shared)
    queries, grouped = heads, False
    if heads and (args["enable_gqa"] if not kernel else not statically_equal(q[-3], k[-3])):
        if not statically_equal(k[-3], v[-3]) or sym_quotient(q[-3], k[-3]) is None:
            return None  # keys and values in groups of their own
        queries, grouped = [*heads[:-1], "(h g)"], True
    s, e = "s!" if kernel or args["is_causal"] else "s", "e!" if kernel else "e"
    kv = [*shared[:-1], k[-3]] if grouped else list(shared)
    terms = [
        broadcast(q, [*queries, s, "d!"], [*out.shape[:-1], q[-1]]),
        broadcast(k, [*heads, "t!", "d!"], [*kv, *k[-2:]]),
        broadcast(v, [*heads, "t!", e], [*kv, *v[-2:]]),
        *(broadcast(shape, [*queries, s, "t!"], [*out.shape[:-1], k[-2]]) for shape in mask),
    ]
    made = [" ".join([*queries, s, e])]
    for i, value in enumerate(others):
        rest = [f"x{i}{d}!" for d in range(value.ndim - len(queries))]
        made.append(" ".join([*queries, *rest] if i == 0 else [f"x{i}{d}!" for d in range(value.ndim)]))
    return RuleText(f"{', '.join(terms)} -> {', '.join(made)}", linear=() if kernel else ((2,),))
