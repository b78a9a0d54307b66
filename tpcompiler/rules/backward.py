"""Backwards that torch's tables do not decompose. In braces: what one gradient alone sums over."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from tpcompiler._torch import aten
from tpcompiler.ir import edit
from tpcompiler.ir.sizes import statically_equal, sym_quotient
from tpcompiler.rules.infer import is_one
from tpcompiler.rules.notation import RuleText, ShardRange
from tpcompiler.rules.pointwise import broadcast
from tpcompiler.rules.pooling import equal_windows, windows
from tpcompiler.rules.registry import op_rule
from tpcompiler.rules.structure import dims_text

ATTENTION_ON_CPU = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
ATTENTION_KERNELS = (
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
)
LINEAR = ((0,),)  # a gradient is linear in the one that comes in


@op_rule(ATTENTION_ON_CPU, *ATTENTION_KERNELS, shards="nonempty")
def attention_backward(node: fx.Node) -> RuleText | None:
    """ "b h s e!, b h s d!, b h t d!, b h t e!, b h s e!, b h s -> b h s d! {t}, b h t d! {s}, b h t e! {s}": the sums
    of the forward's softmax are given, so each query adds to the gradients of keys and values, and each key to that of
    queries. Grouped queries share a kv head: "(h g)" and "h", whose gradients sum over "g". Under is_causal positions
    matter, so both are whole. The kernels of a GPU pad the rows of their sums, so queries are whole.
    """
    args = edit.bound(node)
    if args["dropout_p"] or edit.is_tensor(args.get("cum_seq_q")):
        return None
    q, k = edit.shape(args["query"]), edit.shape(args["key"])
    on_cpu, causal = node.target is ATTENTION_ON_CPU, bool(args["is_causal"])
    mask = args.get("attn_mask", args.get("attn_bias"))
    s = "s" if on_cpu and not causal else "s!"
    t = "t!" if causal or (mask is not None and not on_cpu) else "t"  # a GPU's kernels read a mask in steps of 8 keys
    if sym_quotient(q[1], k[1]) is None:
        return None
    h = "h" if statically_equal(q[1], k[1]) else "(h g)"
    terms = {"query": f"b {h} {s} d!", "key": f"b h {t} d!", "value": f"b h {t} e!", "out": f"b {h} {s} e!"}
    terms |= dict.fromkeys(("grad_out", "grad_out_"), terms["out"])
    names, full = ["b", h, s, t], [*q[:3], k[2]]
    over: list[str] = []  # what the gradient of a mask that broadcasts sums over
    if mask is not None:
        terms["attn_mask"] = terms["attn_bias"] = broadcast(edit.shape(mask), names, full)
        sizes = zip(names, full, edit.shape(mask), strict=True)
        over = [name.strip("()") for name, size, own in sizes if is_one(own) and not is_one(size) and "!" not in name]
    given = []
    for name, value in args.items():
        if not edit.is_tensor(value):
            continue
        if name == "logsumexp":
            rest = [s] if on_cpu else [f"x{d}!" for d in range(edit.ndim(value) - 2)]
            given.append(" ".join(["b", h, *rest]))
        else:  # or the state of a generator
            given.append(terms.get(name) or " ".join(f"{name}{d}!" for d in range(edit.ndim(value))))
    per_query, per_key = _sums(["t"] * (t == "t")), _sums(["s"] * (s == "s") + ["g"] * (h != "h"))
    results = [f"{terms['query']}{per_query}", f"{terms['key']}{per_key}", f"{terms['value']}{per_key}"]
    if len(edit.outputs(node)) == 4:
        results.append(f"{terms['attn_bias']}{_sums(over)}")
    return RuleText(f"{', '.join(given)} -> {', '.join(results)}", linear=LINEAR)


def _sums(factors: Sequence[str]) -> str:
    return f" {{{' '.join(factors)}}}" if factors else ""


@op_rule(aten.convolution_backward.default, shards="nonempty")
def convolution_backward(node: fx.Node) -> RuleText | None:
    """ "n (g o) q0!, n (g i) s0!, (g o) i k0! -> n (g i) s0! {o}, (g o) i k0! {n}": output channels add to the gradient
    of the input, samples to that of the weight. A transposed one has "(g i) o k0!" for the weight. That of the bias is
    a sum by itself (`frontend/backwards.py`). Each by itself is bilinear.
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
    linear = LINEAR if len(kept) == 2 else (*LINEAR, (1,) if wanted[1] else (2,))
    return RuleText(text, factors=factors, linear=linear, counts=counts)


def _adjoint(node: fx.Node, inside: Sequence[str], **options: object) -> RuleText:
    """Return the rule of a backward from the dims of space that its forward reads: "n c s0! -> n c o0", from right to
    left.

    The operands are the gradient, which has the forward's result's dims, as indices have, and the forward's operand.
    A position that the forward produces is whole: its part of the gradient does not say where it was.
    """
    free = dims_text(edit.ndim(node) - len(inside), ())
    outside = " ".join(f"o{d}" if f"(o{d}" in dim else f"o{d}!" for d, dim in enumerate(inside))
    source, made = f"{free} {' '.join(inside)}", f"{free} {outside}"
    others = edit.operands(node)[1:]
    terms = [made, *(made if edit.fake(each).dtype == torch.int64 else source for each in others)]
    return RuleText(f"{', '.join(terms)} -> {source}", linear=LINEAR, **options)  # type: ignore[arg-type]


@op_rule(aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default, shards="nonempty")
def mean_pool_backward(node: fx.Node) -> RuleText:
    """ "d0 d1 o0 o1!, d0 d1 (o0 k0!) s1! -> d0 d1 (o0 k0!) s1!": windows that tile a dim are independent."""
    space = 2 if node.target is aten.avg_pool2d_backward.default else 3
    return _adjoint(node, windows(node, edit.shape(node)[-space:], edit.shape(edit.operands(node)[0])[-space:]))


@op_rule(aten._adaptive_avg_pool2d_backward.default, aten._adaptive_avg_pool3d_backward.default, shards="nonempty")
def adaptive_pool_backward(node: fx.Node) -> RuleText:
    """ "d0 d1 o0 o1!, d0 d1 (o0 k0!) s1! -> d0 d1 (o0 k0!) s1!": as the forward, windows of equal size tile a dim."""
    space = 2 if node.target is aten._adaptive_avg_pool2d_backward.default else 3
    return _adjoint(node, equal_windows(edit.shape(node)[-space:], edit.shape(edit.operands(node)[0])[-space:]))


# Backwards that leave images and channels free, and need space whole: an index counts over one image and channel.
IN_SPACE = {
    aten.max_pool2d_with_indices_backward.default: 2,
    aten.max_pool3d_with_indices_backward.default: 3,
    aten.adaptive_max_pool2d_backward.default: 2,
    aten.adaptive_max_pool3d_backward.default: 3,
    aten.fractional_max_pool2d_backward.default: 2,
    aten.fractional_max_pool3d_backward.default: 3,
    aten.replication_pad1d_backward.default: 1,
    aten.replication_pad2d_backward.default: 2,
    aten.replication_pad3d_backward.default: 3,
}


@op_rule(*IN_SPACE, shards="nonempty")
def space_backward(node: fx.Node) -> RuleText:
    """ "d0 d1 o0! o1!, d0 d1 s0! s1!, d0 d1 o0! o1! -> d0 d1 s0! s1!"."""
    return _adjoint(node, [f"s{d}!" for d in range(IN_SPACE[node.target])])


@op_rule(
    aten.upsample_nearest1d_backward.default,
    aten.upsample_nearest2d_backward.default,
    aten.upsample_nearest3d_backward.default,
    aten._upsample_nearest_exact1d_backward.default,
    aten._upsample_nearest_exact2d_backward.default,
    aten._upsample_nearest_exact3d_backward.default,
    aten.upsample_linear1d_backward.default,
    aten.upsample_bilinear2d_backward.default,
    aten.upsample_trilinear3d_backward.default,
    aten.upsample_bicubic2d_backward.default,
    aten._upsample_bilinear2d_aa_backward.default,
    aten._upsample_bicubic2d_aa_backward.default,
    shards="nonempty",
)
def upsample_backward(node: fx.Node) -> RuleText | None:
    """ "d0 d1 o0! o1! -> d0 d1 s0! s1!": as the forward (`resize.py`), for sizes that are numbers."""
    space = edit.ndim(node) - 2
    if not all(isinstance(size, int) for size in (*edit.shape(node)[2:], *edit.shape(edit.operands(node)[0])[2:])):
        return None
    sizes = {"input_size": (("d0",), ("d1",), *((f"s{d}",) for d in range(space)))}
    return _adjoint(node, [f"s{d}!" for d in range(space)], sizes=sizes)


@op_rule(aten.grid_sampler_2d_backward.default, aten.grid_sampler_3d_backward.default, shards="nonempty")
def grid_sampler_backward(node: fx.Node) -> RuleText:
    """ "n c o0 o1, n c s0! s1!, n o0 o1 x! -> n c s0! s1! {o0 o1}, n o0 o1 x! {c}": each point adds to the gradient of
    the image, each channel to that of the point.
    """
    args = edit.bound(node)
    space = range(edit.ndim(args["input"]) - 2)
    inside, points = " ".join(f"s{d}!" for d in space), " ".join(f"o{d}" for d in space)
    results = [f"n c {inside} {{{points}}}", f"n {points} x! {{c}}"]
    kept = results if args["output_mask"][0] else results[1:]  # that of the points is always computed
    return RuleText(f"n c {points}, n c {inside}, n {points} x! -> {', '.join(kept)}", linear=LINEAR)


def _likelihoods_of_own_classes(
    op: Any,
    grad: torch.Tensor,
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: torch.Tensor,
    *,
    shard: ShardRange,
) -> Any:
    """Return the gradients of the classes that this shard has: -1 stands for one that is not among them."""
    local = target - shard.offset
    absent = (local < 0) | (local >= shard.size) | (target == ignore_index)
    return op(grad, x, torch.where(absent, -1, local), weight, reduction, -1, total_weight)


@op_rule(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default, shards="any")
def likelihood_backward(node: fx.Node) -> RuleText:
    """ ", n c, n, c,  -> n c": of each sample the gradient of one class."""
    args, spots = edit.bound(node), [f"s{d}" for d in range(edit.ndim(node) - 2)]
    samples = " ".join(["n", *spots] if edit.ndim(node) > 1 else [])
    terms = {
        "grad_output": samples if edit.ndim(args["grad_output"]) else "",
        "self": " ".join([*samples.split()[:1], "c", *spots]),
        "target": samples if edit.ndim(args["target"]) else "",
        "weight": "c",
        "total_weight": "",
    }
    given = ", ".join(term for name, term in terms.items() if edit.is_tensor(args[name]))
    body = partial(_likelihoods_of_own_classes, node.target)
    return RuleText(f"{given} -> {terms['self']}", linear=LINEAR, local={"c": body}, local_shards="any")


@op_rule(aten._cdist_backward.default, shards="nonempty")
def distances_backward(node: fx.Node) -> RuleText:
    """ "b0 m n, b0 m k, b0 n k, b0 m n -> b0 m k": each row of the second operand adds to the gradient of the first."""
    full = edit.shape(edit.operands(node)[0])
    batch = [f"b{d}" for d in range(len(full) - 2)]
    names = (["m", "n"], ["m", "k"], ["n", "k"], ["m", "n"])
    terms = [
        " ".join([broadcast(edit.shape(operand)[:-2], batch, full[:-2]), *rows])
        for operand, rows in zip(edit.operands(node), names, strict=True)
    ]
    return RuleText(f"{', '.join(terms)} -> {' '.join([*batch, 'm', 'k'])}", linear=LINEAR)


@op_rule(aten._pdist_backward.default, shards="any")
def pair_distances_backward(node: fx.Node) -> RuleText:
    """ "q!, n! k, q! -> n! k": distances are between all rows, and the dims of a row are independent."""
    return RuleText("q!, n! k, q! -> n! k", linear=LINEAR)
