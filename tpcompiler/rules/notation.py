"""The text form of a sharding rule, and what it means for one node.

    "b k, n k, +n -> b n"        linear: k is summed, the bias is an addend
    "d0 d1! -> d0 d1!"           softmax over the last dim: it must stay whole
    "b (k g) s d, b k t d -> .." a compound dim, outer factor first (grouped queries)
    "a 1 -> a b"                 1: a broadcast dim of size 1
    "a [q k] -> a q, a k"        a dim of factors in a row, each cut by itself (a split, a cat)
    "a [_x c] -> a c"            _x: left out, and so neither reduced nor made

Operands are the tensor operands in order, separated by commas; nothing between commas is a 0-d tensor. A factor that
stands on the left only is reduced: sharding it leaves Partial. A factor that stands on the right only is made there.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

from tpcompiler.errors import RuleError
from tpcompiler.ir.dim_sharding import DimSharding, Size
from tpcompiler.ir.mesh import Mesh

Shards = Literal["any", "nonempty", "even"]
Dim = tuple[str, ...]  # factors, outermost first; () is a dim of size 1
Term = tuple[Dim, ...]


class Joined(Dim):
    """The factors of a dim in which they stand in a row: their sizes add up."""


def dim_size(dim: Dim, extent: Mapping[str, Size]) -> Size:
    """The size of a dim of these factors."""
    sizes = [extent[factor] for factor in dim]
    return sum(sizes) if isinstance(dim, Joined) else math.prod(sizes)


@dataclass(frozen=True)
class Pattern:
    """A parsed rule text, before sizes are known."""

    inputs: tuple[Term, ...]
    outputs: tuple[Term, ...]
    addends: frozenset[int]
    whole: frozenset[str]


@dataclass(frozen=True)
class RuleText:
    """What a rule function returns when a plain text is not enough.

    Attributes:
        sizes: the size arguments: argument -> the dims that its entries count.
        factors: sizes of factors that the shapes do not tell.
        reduce: the Partial op that reduced factors leave.
        linear: sets of operands in which the op is jointly linear, so that Partial may pass through.
        local: for a factor that a plain local run gets wrong, the body that computes one shard's share: it is called
            as the op is, with `shard=ShardRange(...)` of that factor besides. Factors are cut together, over several
            axes, only if they have one body; it is given the range of the first, and the fraction of all of them.
        local_shards: what the shards that these bodies take must be, where the op itself takes any.
        positions: a factor -> the operand that holds positions along it, and whether those below zero count from the
            end. Of a factor that is cut, a rank's program asserts before the body that they are in the whole dim.
        counts: arguments that count elements of factors, which the first output need not have: argument -> for each of
            its entries the factors that it counts together.
    """

    text: str
    sizes: Mapping[str, Term] = field(default_factory=dict)
    factors: Mapping[str, Size] = field(default_factory=dict)
    reduce: str = "sum"
    linear: tuple[tuple[int, ...], ...] = ()
    local: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    local_shards: Shards = "nonempty"
    counts: Mapping[str, tuple[tuple[str, ...], ...]] = field(default_factory=dict)
    positions: Mapping[str, tuple[int, bool]] = field(default_factory=dict)


@dataclass(frozen=True)
class ShardRange:
    """Which part of a factor a rank holds: `size` elements from `offset`; `fraction` of all.

    A body is given the offset as a tensor of no dims: the rank that runs the program says what it is.
    """

    offset: Any
    size: Size
    fraction: float

    @classmethod
    def of(cls, cuts: Sequence[tuple[DimSharding, Size]], mesh: Mesh, here: Mapping[str, int]) -> ShardRange:
        """What the rank at these coordinates holds of factors, each with its size."""
        shares = [cut.share(total, mesh, here) for cut, total in cuts]
        fractions = (
            size / total if isinstance(total, int) else 1 / mesh.size(cut.axes)
            for (cut, total), (_, size) in zip(cuts, shares, strict=True)
        )
        return cls(*shares[0], math.prod(fractions))


@dataclass(frozen=True)
class Rule:
    """A rule for one node: the pattern with the size of every factor."""

    pattern: Pattern
    extent: Mapping[str, Size]
    shards: Shards
    reduce: str
    sizes: Mapping[str, Term]
    linear: tuple[frozenset[int], ...]  # sets of operands in which the op is jointly linear
    local: Mapping[str, Callable[..., Any]]  # factor -> body that computes one shard's share
    local_shards: Shards
    relayout: bool  # moves or casts data only: leaves are looked up backwards through it
    counts: Mapping[str, tuple[tuple[str, ...], ...]]
    positions: Mapping[str, tuple[int, bool]] = field(default_factory=dict)

    @property
    def skips_empty(self) -> bool:
        """Whether a rank with an empty share of what is made makes that without the op, which cannot take it."""
        given = {dim for term in self.pattern.inputs for dim in term}
        dims = [dim for term in self.pattern.outputs for dim in term]
        # A dynamic size is read off an operand that has it.
        known = all(dim in given or all(isinstance(self.extent[f], int) for f in dim) for dim in dims)
        return self.shards == "nonempty" and len(self.pattern.outputs) == 1 and known

    @property
    def made(self) -> frozenset[str]:
        return frozenset(factor for term in self.pattern.outputs for dim in term for factor in dim)

    @property
    def reduced(self) -> frozenset[str]:
        given = {factor for term in self.pattern.inputs for dim in term for factor in dim}
        return frozenset(factor for factor in given - self.made if not factor.startswith("_"))

    @property
    def factors(self) -> tuple[str, ...]:
        """Every factor once, in the order in which the text names them."""
        terms = (*self.pattern.inputs, *self.pattern.outputs)
        return tuple(dict.fromkeys(f for term in terms for dim in term for f in dim))


def _term(text: str, whole: set[str]) -> Term:
    dims: list[Dim] = []
    for group, row, single in re.findall(r"\(([^)]*)\)|\[([^]]*)\]|(\S+)", text):
        names = []
        for name in (group or row or single).split():
            if name.endswith("!"):
                name = name[:-1]
                whole.add(name)
            if name != "1" and not name.isidentifier():
                raise RuleError(f"{name!r} in the rule {text!r} is not a factor", help="use names, 1, ! and ( )")
            if name != "1":
                names.append(name)
        dims.append(Joined(names) if row else tuple(names))
    return tuple(dims)


@lru_cache(maxsize=4096)
def parse(text: str) -> Pattern:
    """Read a rule text.

    Raises:
        RuleError: no single `->`, or a name that is not an identifier.
    """
    if text.count("->") != 1:
        raise RuleError(f"rule {text!r} needs one '->'", help="write operands -> outputs")
    left, right = text.split("->")
    whole: set[str] = set()
    addends, inputs = set(), []
    for index, operand in enumerate(left.split(",")):
        operand = operand.strip()
        if operand.startswith("+"):
            addends.add(index)
            operand = operand[1:]
        inputs.append(_term(operand, whole))
    outputs = tuple(_term(part, whole) for part in right.split(","))
    made = {f for term in outputs for dim in term for f in dim}
    given = {f for term in inputs for dim in term for f in dim}
    return Pattern(tuple(inputs), outputs, frozenset(addends), frozenset(whole | (made - given)))


def extents(
    pattern: Pattern, shapes: Sequence[Sequence[Size]], known: Mapping[str, Size], what: str
) -> dict[str, Size]:
    """The size of every factor, from the shapes of operands and outputs.

    Raises:
        RuleError: a term of another order than its tensor, or a size that stays unknown.
    """
    terms = (*pattern.inputs, *pattern.outputs)
    if [len(t) for t in terms] != [len(s) for s in shapes]:
        raise RuleError(
            f"the rule of {what} has terms of {[len(t) for t in terms]} dims, "
            f"the tensors have {[len(s) for s in shapes]}",
            help="give every tensor operand and output one term with one entry per dim",
        )
    found = dict(known)
    pairs = [
        (dim, size) for term, shape in zip(terms, shapes, strict=True) for dim, size in zip(term, shape, strict=True)
    ]
    for dim, size in pairs:
        if len(dim) == 1:
            found.setdefault(dim[0], size)
    for dim, size in pairs:
        missing = [f for f in dim if f not in found]
        if len(missing) == 1 and not isinstance(dim, Joined):
            rest: Size = 1
            for factor in dim:
                rest = rest * found.get(factor, 1)
            found[missing[0]] = size // rest
    unknown = {f for dim, _ in pairs for f in dim if f not in found}
    if unknown:
        raise RuleError(f"the rule of {what} leaves the sizes of {sorted(unknown)} open", help="give them as factors=")
    return found
