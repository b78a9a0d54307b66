"""Backwards that torch's tables do not decompose. In braces: what one gradient alone sums over."""

from __future__ import annotations

from torch import fx

from tpcompiler._torch import aten
from tpcompiler.ir import edit
from tpcompiler.rules.notation import RuleText
from tpcompiler.rules.pointwise import broadcast
from tpcompiler.rules.registry import op_rule


@op_rule(aten._scaled_dot_product_flash_attention_for_cpu_backward.default, shards="nonempty")
def attention_backward(node: fx.Node) -> RuleText | None:
    """ "b h s e!, b h s d!, b h t! d!, b h t! e!, b h s e!, b h s -> b h s d!, b h t! d! {s}, b h t! e! {s}": heads are
    independent, and each query adds to the gradients of keys and values. Linear in the gradient that comes in.
    """
    args = edit.arguments(node)
    if args.dropout_p:
        return None
    _, q, k, _, out, _, *mask = (edit.shape(operand) for operand in edit.operands(node))
    if q[1] != k[1]:
        return None  # grouped queries
    s = "s!" if args.is_causal else "s"
    query, keys, values, made = f"b h {s} d!", "b h t! d!", "b h t! e!", f"b h {s} e!"
    masks = [broadcast(shape, ["b", "h", s, "t!"], [*out[:-1], k[-2]]) for shape in mask]
    terms = [made, query, keys, values, made, f"b h {s}", *masks]
    each = "" if args.is_causal else " {s}"
    return RuleText(f"{', '.join(terms)} -> {query}, {keys}{each}, {values}{each}", linear=((0,),))


@op_rule(aten.convolution_backward.default, shards="nonempty")
def convolution_backward(node: fx.Node) -> RuleText | None:
    """ "n (g o) q0!, n (g i) s0!, (g o) i k0! -> n (g i) s0! {o}, (g o) i k0! {n}": output channels add to the gradient
    of the input, samples to that of the weight. A transposed one has "(g i) o k0!" for the weight. That of the bias is
    a sum by itself (`passes/canonicalize.py`).
    """
    args = edit.bound(node)
    *wanted, of_bias = args["output_mask"]
    if of_bias:
        return None
    space, grouped = len(args["stride"]), args["groups"] > 1
    given, made = ("(g i)", "(g o)") if grouped else ("i", "o")
    inside, outside, kernel = (" ".join(f"{letter}{d}!" for d in range(space)) for letter in "sqk")
    weight = f"{given} o {kernel}" if args["transposed"] else f"{made} i {kernel}"
    results = [f"n {given} {inside} {{o}}", f"{weight} {{n}}"]
    kept = [text for text, is_wanted in zip(results, wanted, strict=True) if is_wanted]
    text = f"n {made} {outside}, n {given} {inside}, {weight} -> {', '.join(kept)}"
    factors, counts = ({"g": args["groups"]}, {"groups": (("g",),)}) if grouped else ({}, {})
    return RuleText(text, factors=factors, linear=((0,),), counts=counts)


@op_rule(aten.max_pool2d_with_indices_backward.default, shards="nonempty")
def max_pool_backward(node: fx.Node) -> RuleText:
    """ "n c o0! o1!, n c s0! s1!, n c o0! o1! -> n c s0! s1!": an index counts within one image and channel."""
    free = " ".join(["n", "c"][4 - edit.ndim(node) :])
    return RuleText(f"{free} o0! o1!, {free} s0! s1!, {free} o0! o1! -> {free} s0! s1!", linear=((0,),))
