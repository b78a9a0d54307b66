"""Scaled dot-product attention: heads and queries are independent; the softmax needs keys and features whole."""

from __future__ import annotations

from torch import fx

from tpcompiler._torch import aten
from tpcompiler.ir import edit
from tpcompiler.ir.sizes import statically_equal, sym_quotient
from tpcompiler.rules.infer import is_one
from tpcompiler.rules.notation import RuleText
from tpcompiler.rules.pointwise import broadcast
from tpcompiler.rules.registry import op_rule

# The kernels that also return the log-sum-exp of each query's scores, each on its kind of device.
CPU_KERNEL = aten._scaled_dot_product_flash_attention_for_cpu.default
CUDA_KERNEL = aten._scaled_dot_product_efficient_attention.default
KERNELS = (
    CPU_KERNEL,
    aten._scaled_dot_product_flash_attention.default,
    CUDA_KERNEL,
    aten._scaled_dot_product_cudnn_attention.default,
)


@op_rule(aten.scaled_dot_product_attention.default, *KERNELS, shards="nonempty")
def attention(node: fx.Node) -> RuleText | None:
    """ "b0 (h g) s d!, b0 h t! d!, b0 h t! e -> b0 (h g) s e": grouped queries share a kv head; linear in the values.

    Batch dims and heads of one element broadcast, as does a mask to [.., heads, s, t]. Under is_causal the position of
    a query matters, so queries are whole. A kernel's form also returns the padded sums of its rows, and requires e = d.
    """
    args = edit.arguments(node)
    if args.dropout_p or getattr(args, "return_debug_mask", False):
        return None
    q, k, v, *mask = (edit.shape(operand) for operand in edit.operands(node))
    kernel = node.target in KERNELS
    out, *others = edit.outputs(node)
    shared = out.shape[:-2]  # batch dims and heads
    heads = [f"b{d}" for d in range(len(shared) - 1)] + ["h"] * bool(shared)
    queries, keys, values = heads, heads, heads
    factors, kv = {}, [list(shared)] * 2
    if heads and (args.enable_gqa if not kernel else not statically_equal(q[-3], k[-3])):
        several, few = (k[-3], v[-3]) if sym_quotient(k[-3], v[-3]) is not None else (v[-3], k[-3])
        times = sym_quotient(several, few)
        kv = [[*shared[:-1], k[-3]], [*shared[:-1], v[-3]]]
        names = ["(h g)", "h", "h"]
        if times is None or sym_quotient(q[-3], several) is None:
            names = ["q!", "k!", "v!"]  # no common groups
        elif not is_one(times):  # several value heads share one key head, or vice versa
            factors = {"i": times}
            names = ["(h i g)", *("(h i)" if statically_equal(size, several) else "h" for size in (k[-3], v[-3]))]
        queries, keys, values = ([*heads[:-1], name] for name in names)
    s, e = "s!" if args.is_causal or (kernel and node.target is not CPU_KERNEL) else "s", "e!" if kernel else "e"
    terms = [
        broadcast(q, [*queries, s, "d!"], [*out.shape[:-1], q[-1]]),
        broadcast(k, [*keys, "t!", "d!"], [*kv[0], *k[-2:]]),
        broadcast(v, [*values, "t!", e], [*kv[1], *v[-2:]]),
        *(broadcast(shape, [*queries, s, "t!"], [*out.shape[:-1], k[-2]]) for shape in mask),
    ]
    results = [" ".join([*queries, s, e])]
    for i, value in enumerate(others):
        rest = [s] if node.target is CPU_KERNEL else [f"x{i}{d}!" for d in range(value.ndim - len(queries))]
        results.append(" ".join([*queries, *rest] if i == 0 else [f"x{i}{d}!" for d in range(value.ndim)]))
    text = f"{', '.join(terms)} -> {', '.join(results)}"
    return RuleText(text, factors=factors, linear=() if kernel else ((2,),))
