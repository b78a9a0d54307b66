"""Products: contracted factors are summed, and a fused bias is an addend."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import fx

from tpcompiler._torch import aten
from tpcompiler.ir import edit
from tpcompiler.ir.dim_sharding import Size
from tpcompiler.ir.sizes import sym_quotient
from tpcompiler.rules.infer import is_one
from tpcompiler.rules.notation import RuleText
from tpcompiler.rules.pointwise import broadcast
from tpcompiler.rules.registry import op_rule

BILINEAR = ((0,), (1,))
PACKED_ROWS = 64  # the rows of 4-bit weights that torch's CPU kernel reads together


@op_rule(aten.linear.default, shards="any")
def linear(node: fx.Node) -> RuleText:
    """Batch dims pass through, k is summed: sharding k leaves Partial(sum); the bias is an addend."""
    operands = edit.operands(node)
    batch = " ".join(f"b{d}" for d in range(edit.ndim(operands[0]) - 1))
    n = "n" if edit.ndim(operands[1]) == 2 else ""  # else a weight of one dim
    bias = ", +n" if len(operands) == 3 else ""
    return RuleText(f"{batch} k, {n} k{bias} -> {batch} {n}", linear=BILINEAR)


PRODUCTS = {
    aten.mm.default: "m k, k n -> m n",
    aten._int_mm.default: "m k, k n -> m n",
    aten.bmm.default: "b m k, b k n -> b m n",
}


@op_rule(*PRODUCTS, shards="any")
def product(node: fx.Node) -> RuleText:
    """ "m k, k n -> m n", for each pair of matrices."""
    return RuleText(PRODUCTS[node.target], linear=BILINEAR)


@op_rule(aten._weight_int8pack_mm.default, shards="nonempty")
def int8pack_mm(node: fx.Node) -> RuleText:
    """ "m k, n k, n -> m n": int8 weights with a scale per row."""
    return RuleText("m k, n k, n -> m n", linear=((0,), (2,)))


@op_rule(aten._weight_int4pack_mm_for_cpu.default, shards="nonempty")
def int4pack_mm(node: fx.Node) -> RuleText:
    """ "m k!, (n n_!) p!, g! (n n_!) 2! -> m (n n_!)": 64 rows of weights are packed together, each with all of k."""
    rows = "(n n_!)" if sym_quotient(edit.shape(node)[1], PACKED_ROWS) is not None else "n!"
    text = f"m k!, {rows} p!, g! {rows} s! -> m {rows}"
    return RuleText(text, factors={"n_": PACKED_ROWS}, linear=((0,),))


PRODUCTS_WITH_ADDEND = {
    aten.addmm.default: "m k, k n -> m n",
    aten.baddbmm.default: "b m k, b k n -> b m n",
    aten.addbmm.default: "b m k, b k n -> m n",  # the batch is summed too
}


@op_rule(*PRODUCTS_WITH_ADDEND, shards="any")
def product_with_addend(node: fx.Node) -> RuleText:
    """ "+n, m k, k n -> m n", with the first operand broadcast."""
    return _with_addend(node, PRODUCTS_WITH_ADDEND[node.target])


@op_rule(aten.addmv.default, shards="nonempty")
def addmv(node: fx.Node) -> RuleText:
    """ "+m, m k, k -> m", with the first operand broadcast, which torch does not do for an empty shard."""
    return _with_addend(node, "m k, k -> m")


def _with_addend(node: fx.Node, text: str) -> RuleText:
    names = text.partition("-> ")[2].split()
    addend = broadcast(edit.shape(edit.operands(node)[0]), names, edit.shape(node))
    return RuleText(f"+{addend}, {text}", linear=((1,), (2,)))


@op_rule(aten._trilinear.default, shards="any")
def trilinear(node: fx.Node) -> RuleText | None:
    """d0 d2, d1 d2 d3, d0 d3 -> d0 d1, the core of `bilinear`: an operand lacks the dims that it is expanded by."""
    args = edit.bound(node)
    names = [f"d{d}" for d in range(edit.ndim(args["i1"]) + len(args["expand1"]))]

    def without(dims: Sequence[int]) -> str:
        return " ".join(name for d, name in enumerate(names) if d not in dims)

    terms = ", ".join(without(args[f"expand{i}"]) for i in (1, 2, 3))
    return RuleText(f"{terms} -> {without(args['sumdim'])}", linear=((0,), (1,), (2,)))


@op_rule(aten.matmul.default, shards="any")
def matmul(node: fx.Node) -> RuleText:
    """Multiply vectors, matrices and batches, with batch dims that broadcast."""
    left, right = (edit.shape(o) for o in edit.operands(node))
    rows = ["m"] if len(left) > 1 else []
    columns = ["n"] if len(right) > 1 else []
    out = edit.shape(node)
    batch = [f"b{d}" for d in range(len(out) - len(rows) - len(columns))]
    a = " ".join([broadcast(left[:-2], batch, out[: len(batch)]), *rows, "k"])
    b = " ".join([broadcast(right[:-2], batch, out[: len(batch)]), "k", *columns])
    return RuleText(f"{a}, {b} -> {' '.join([*batch, *rows, *columns])}", linear=BILINEAR)


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
