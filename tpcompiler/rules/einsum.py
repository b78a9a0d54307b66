"""Contractions with named dims: the equation already is the text of a rule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import fx

from tpcompiler._torch import aten
from tpcompiler.ir import edit
from tpcompiler.ir.dim_sharding import Size
from tpcompiler.rules.notation import RuleText
from tpcompiler.rules.pointwise import is_one
from tpcompiler.rules.registry import op_rule


@op_rule(aten.einsum.default, shards="any")
def einsum(node: fx.Node) -> RuleText:
    """`bhsd,bhtd->bhst` reads "b h s d, b h t d -> b h s t"; `..` stands for broadcast dims, e1 e0 in front.

    A dim of one element is 1 if another operand has more. A letter repeated in one operand, a diagonal, stays whole.
    """
    left, arrow, right = edit.arguments(node).equation.replace(" ", "").partition("->")
    operands = left.split(",")
    shapes = [edit.shape(operand) for operand in edit.operands(node)]
    between = [len(shape) - len(term.replace("...", "")) for term, shape in zip(operands, shapes, strict=True)]
    if not arrow:  # the output then has the broadcast dims and the letters that occur once, in alphabetic order
        letters = Counter(left.replace("...", "").replace(",", ""))
        right = "..." * ("..." in left) + "".join(sorted(name for name, count in letters.items() if count == 1))
    terms = [_names(term, count) for term, count in zip(operands, between, strict=True)]
    twice = {name for term in terms for name, count in Counter(term).items() if count > 1}
    return _contraction(terms, shapes, _names(right, max(between, default=0)), twice)


def _names(term: str, between: int) -> list[str]:
    """Return a name per dim; the dims that `...` stands for are counted from the right."""
    before, dots, after = term.partition("...")
    return [*before, *(f"e{d}" for d in reversed(range(between if dots else 0))), *after]


@op_rule(aten.tensordot.default, shards="any")
def tensordot(node: fx.Node) -> RuleText:
    """ "a0 k0 k1, k0 k1 b2 -> a0 b2" """
    args = edit.bound(node)
    terms, shapes = [], [edit.shape(operand) for operand in edit.operands(node)]
    for prefix, side, shape in zip("ab", ("dims_self", "dims_other"), shapes, strict=True):
        term = [f"{prefix}{d}" for d in range(len(shape))]
        for at, dim in enumerate(args[side]):
            term[dim] = f"k{at}"
        terms.append(term)
    return _contraction(terms, shapes, [name for term in terms for name in term if name[0] != "k"])


def _contraction(
    terms: Sequence[Sequence[str]],
    shapes: Sequence[Sequence[Size]],
    out: Sequence[str],
    whole: frozenset[str] | set[str] = frozenset(),
) -> RuleText:
    """Return the rule of a sum of products of these operands, linear in each of them."""
    sizes: dict[str, Size] = {}
    for term, shape in zip(terms, shapes, strict=True):
        for name, size in zip(term, shape, strict=True):
            if is_one(sizes.get(name, 1)):
                sizes[name] = size
    words = [
        " ".join(
            "1" if is_one(size) and not is_one(sizes[n]) else f"{n}!" if n in whole else n
            for n, size in zip(*pair, strict=True)
        )
        for pair in zip(terms, shapes, strict=True)
    ]
    linear = tuple((index,) for index in range(len(terms)))
    return RuleText(f"{', '.join(words)} -> {' '.join(out)}", linear=linear)
