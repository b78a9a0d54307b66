"""Ops that only rearrange dims. One algorithm over groups of dims covers all reshapes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from tpcompiler._torch import aten
from tpcompiler.ir import edit
from tpcompiler.ir.dim_sharding import Size
from tpcompiler.ir.sizes import statically_equal, sym_quotient
from tpcompiler.rules.infer import is_one
from tpcompiler.rules.notation import RuleText, ShardRange, Term, parse
from tpcompiler.rules.registry import op_rule


def dim_groups(source: Sequence[Size], target: Sequence[Size]) -> tuple[str, dict[str, Size]]:
    """Return the factors that a reshape of `source` to `target` keeps, as a rule text with the factors' sizes.

    Walks both shapes from the left and splits each pair of sizes by the one that divides the other, so that [b, s, 12]
    -> [b, s, 3, 4] reads "f0 f1 (f2 f3) -> f0 f1 f2 f3". If neither divides the other, only the equal leading dims are
    kept, and the rest must stay whole. Dims of size 1 have no factor.
    """
    sizes: dict[str, Size] = {}
    left: list[list[str]] = [[] for _ in source]
    right: list[list[str]] = [[] for _ in target]
    i = j = 0
    a: Size = 1
    b: Size = 1
    while True:
        while is_one(a) and i < len(source):
            a, i = source[i], i + 1
        while is_one(b) and j < len(target):
            b, j = target[j], j + 1
        if is_one(a) and is_one(b):
            break
        name = f"f{len(sizes)}"
        if statically_equal(a, b):
            sizes[name], a, b = a, 1, 1
        elif (rest := sym_quotient(a, b)) is not None and not is_one(b):
            sizes[name], a, b = b, rest, 1
        elif (rest := sym_quotient(b, a)) is not None and not is_one(a):
            sizes[name], a, b = a, 1, rest
        else:
            return _opaque(source, target)
        left[i - 1].append(name)
        right[j - 1].append(name)
    return f"{_words(left)} -> {_words(right)}", sizes


def _opaque(source: Sequence[Size], target: Sequence[Size]) -> tuple[str, dict[str, Size]]:
    """Return the factors of shapes without common ones: only the equal leading dims are kept."""
    common = 0
    while common < min(len(source), len(target)) and statically_equal(source[common], target[common]):
        common += 1
    left = [[f"f{d}"] if d < common else [f"i{d}!"] for d in range(len(source))]
    right = [[f"f{d}"] if d < common else [f"o{d}!"] for d in range(len(target))]
    sizes = {
        names[0].rstrip("!"): size
        for names, size in (*zip(left, source, strict=True), *zip(right, target, strict=True))
    }
    return f"{_words(left)} -> {_words(right)}", sizes


def _words(dims: list[list[str]]) -> str:
    return " ".join("1" if not d else d[0] if len(d) == 1 else f"({' '.join(d)})" for d in dims)


def _out_term(text: str) -> Term:
    return parse(text).outputs[0]


SIZES = {  # the argument that counts dims of the result
    aten.view.default: "size",
    aten._unsafe_view.default: "size",
    aten.view_copy.default: "size",
    aten.reshape.default: "shape",
    aten.unflatten.int: "sizes",
}


@op_rule(*SIZES, aten.unsqueeze.default, aten.flatten.using_ints, shards="any", relayout=True)
def view(node: fx.Node) -> RuleText:
    """Reshape freely; an argument may count the result's dims, or those that one dim becomes."""
    (operand,) = edit.operands(node)
    text, factors = dim_groups(edit.shape(operand), edit.shape(node))
    term = _out_term(text)
    if node.target is aten.unflatten.int:
        first = edit.arguments(node).dim % edit.ndim(operand)
        term = term[first : first + len(edit.arguments(node).sizes)]
    sizes = {SIZES[node.target]: term} if node.target in SIZES else {}
    return RuleText(text, sizes=sizes, factors=factors, linear=((0,),))


@op_rule(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, shards="any", relayout=True)
def squeeze(node: fx.Node) -> RuleText:
    """Drop dims of the whole tensor: a shard of one row keeps its dim."""
    (operand,) = edit.operands(node)
    shape = edit.shape(operand)
    text, factors = dim_groups(shape, edit.shape(node))
    argument = edit.bound(node).get("dim", range(len(shape)))
    candidates = {d % max(len(shape), 1) for d in ([argument] if isinstance(argument, int) else argument)}
    gone = [d for d, size in enumerate(shape) if d in candidates and is_one(size)]
    term = parse(text).inputs[0]
    sharded = [term[d][0] for d, size in enumerate(shape) if d in candidates and not is_one(size)]
    local = dict.fromkeys(sharded, partial(_squeezed, gone=gone))
    return RuleText(text, factors=factors, linear=((0,),), local=local)


def _squeezed(value: torch.Tensor, *args: Any, shard: ShardRange, gone: list[int]) -> torch.Tensor:
    result: torch.Tensor = aten.squeeze.dims(value, gone)
    return result


@op_rule(
    aten.permute.default,
    aten.permute_copy.default,
    aten.transpose.int,
    aten.t.default,
    aten.movedim.int,
    shards="any",
    relayout=True,
)
def permute(node: fx.Node) -> RuleText:
    (operand,) = edit.operands(node)
    order = list(range(edit.ndim(operand)))
    args = edit.arguments(node)
    if not order:
        return RuleText(" -> ", linear=((0,),))
    if node.target in (aten.permute.default, aten.permute_copy.default):
        order = [d % len(order) for d in args.dims]
    elif node.target is aten.t.default:
        order.reverse()
    elif node.target is aten.movedim.int:
        order.insert(args.destination % len(order), order.pop(args.source % len(order)))
    else:
        a, b = args.dim0 % len(order), args.dim1 % len(order)
        order[a], order[b] = order[b], order[a]
    before = " ".join(f"d{d}" for d in range(len(order)))
    return RuleText(f"{before} -> {' '.join(f'd{d}' for d in order)}", linear=((0,),))


@op_rule(aten.expand.default, shards="any", relayout=True)
def expand(node: fx.Node) -> RuleText:
    """Broadcast dims of size 1 or new ones: "1 d1 -> n0 d1"."""
    (operand,) = edit.operands(node)
    source, target = edit.shape(operand), edit.shape(node)
    first = len(target) - len(source)
    grown = [d < first or (is_one(source[d - first]) and not is_one(target[d])) for d in range(len(target))]
    left = " ".join("1" if grown[d] else f"d{d}" for d in range(first, len(target)))
    right = " ".join(f"n{d}" if grown[d] else f"d{d}" for d in range(len(target)))
    return RuleText(f"{left} -> {right}", sizes={"size": _out_term(f"{left} -> {right}")}, linear=((0,),))


@op_rule(aten.repeat.default, shards="any")
def repeat(node: fx.Node) -> RuleText | None:
    """ "d0 1 d2 -> d0 n1! (r2! d2)": each repetition is a block with the operand's cut; a dim of 1 becomes a factor."""
    (operand,) = edit.operands(node)
    source, target = edit.shape(operand), edit.shape(node)
    if any(isinstance(size, int) and size == 0 for size in target):
        return None  # nothing is repeated
    first = len(target) - len(source)
    left, right = [f"d{d}" for d in range(first, len(target))], []
    for d, times in enumerate(edit.arguments(node).repeats):
        if isinstance(times, int) and times == 1 and d >= first:
            right.append(f"d{d}")
        elif d < first or is_one(source[d - first]):
            left[max(d - first, 0) : max(d - first + 1, 0)] = ["1"] * (d >= first)
            right.append(f"n{d}!")
        else:
            right.append(f"(r{d}! d{d})")
    return RuleText(f"{' '.join(left)} -> {' '.join(right)}", linear=((0,),))


@op_rule(aten.view_as_real.default, aten.view_as_complex.default, shards="any", relayout=True)
def complex_parts(node: fx.Node) -> RuleText:
    """ "d0 d1 -> d0 d1 p", or back: the last dim holds the real and the imaginary part. Linear: a view."""
    ndim = min(edit.ndim(edit.operands(node)[0]), edit.ndim(node))
    dims = " ".join(f"d{d}" for d in range(ndim))
    both = f"{dims} p!"
    text = f"{dims} -> {both}" if node.target is aten.view_as_real.default else f"{both} -> {dims}"
    return RuleText(text, linear=((0,),))


@op_rule(aten.view.dtype, aten.view_copy.dtype, shards="nonempty", relayout=True)
def bits(node: fx.Node) -> RuleText:
    """ "d0 d1 -> d0 (d1 p)": the same bits as smaller numbers; "d0 (d1 p!) -> d0 d1": as larger ones. Not linear."""
    (operand,) = edit.operands(node)
    before, after = edit.fake(operand), edit.fake(node)
    *dims, last = [f"d{d}" for d in range(before.ndim)] or [""]
    left, right = last, last
    if before.element_size() > after.element_size():
        right = f"({last} p!)"
    elif before.element_size() < after.element_size():
        left = f"({last} p!)"
    ratio = max(before.element_size() // after.element_size(), after.element_size() // before.element_size())
    return RuleText(f"{' '.join([*dims, left])} -> {' '.join([*dims, right])}", factors={"p": ratio})
