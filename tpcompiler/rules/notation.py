"""The text form of a sharding rule, and its meaning for one node.

    "b k, n k, +n -> b n"        linear: k is summed, the bias is an addend
    "d0 d1! -> d0 d1!"           softmax over the last dim: it must stay whole
    "b (k g) s d, b k t d -> .." a compound dim, outer factor first (grouped queries)
    "a 1 -> a b"                 1: a broadcast dim of size 1
    "a [q k] -> a q, a k"        a dim of factors in a row, each cut by itself (a split, a cat)
    "a [_x c] -> a c"            _x: left out, so neither reduced nor produced
    "q d, k d -> q d, k d {q}"   {q}: a factor that this output sums over, and another has (the gradient of keys)

Operands are the tensor operands in order, separated by commas; an empty term is a 0-d tensor. A factor only on the left
is reduced: sharding it leaves Partial. A factor only on the right is produced by the op.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple

from tpcompiler.errors import RuleError
from tpcompiler.ir.dim_sharding import DimSharding, Size
from tpcompiler.ir.mesh import Mesh

Shards = Literal["any", "nonempty", "even"]
Dim = tuple[str, ...]  # factors, outermost first; () is a dim of size 1
Term = tuple[Dim, ...]


class Joined(Dim):
    """The factors of a dim that consists of pieces in a row: their sizes add up."""


def dim_size(dim: Dim, extent: Mapping[str, Size]) -> Size:
    """Return the size of a dim with these factors."""
    sizes = [extent[factor] for factor in dim]
    return sum(sizes) if isinstance(dim, Joined) else math.prod(sizes)


@dataclass(frozen=True)
class Pattern:
    """A parsed rule text, without sizes."""

    inputs: tuple[Term, ...]
    outputs: tuple[Term, ...]
    addends: frozenset[int]
    whole: frozenset[str]
    sums: tuple[frozenset[str], ...]  # for each output, the factors that it alone sums over


@dataclass(frozen=True)
class RuleText:
    """The result of a rule function that needs more than a plain text.

    Attributes:
        sizes: the size arguments: argument -> the dims that its entries count.
        factors: sizes of factors that do not follow from the shapes.
        reduce: the Partial op that reduced factors leave.
        linear: sets of operands in which the op is jointly linear, so that Partial may pass through.
        local: factor -> the body that computes one shard's share, if a plain local run would be wrong. It is called
            like the op, plus `shard=ShardRange(...)` of that factor. Factors are sharded together, over several axes,
            only if they share one body; it gets the range of the first, and the fraction of all of them.
        local_shards: the requirement on the shards that these bodies take, if the op itself takes any.
        positions: factor -> the operand that holds positions along it, and True if negative positions count from the
            end. If the factor is sharded, a rank's program asserts before the body that all positions are inside the
            whole dim.
        counts: argument -> for each entry, the factors whose elements it counts together; the first output need not
            have these factors.
        windows: factor of the result -> the elements of an operand's dim that its elements are computed from. If it is
            sharded, ranks get these elements from their neighbours, and its body runs on them.
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
    windows: Mapping[str, Window] = field(default_factory=dict)


class Window(NamedTuple):
    """The elements of an operand's dim that a run of a factor's elements is computed from.

    Attributes:
        factor: the operand's dim, which is whole in the text.
        at: the dim's place in space.
        size: of the operand's dim.
        reach: (start, stop) of elements -> the first and behind the last element that they need, maybe outside the dim,
            and the place of the first of them in the result of a window on these.
    """

    factor: str
    at: int
    size: int
    reach: Callable[[int, int], tuple[int, int, int]]

    def span(self, start: int, stop: int) -> tuple[int, int]:
        """Return the elements of the dim that the elements from `start` to `stop` need."""
        first, last, _ = self.reach(start, stop)
        first = min(max(first, 0), self.size)
        return first, max(min(last, self.size), first)

    def frame(self, start: int, size: int) -> Frame:
        """Return the share of the dim that `size` elements from `start` on are."""
        first, last, place = self.reach(start, start + size)
        begin, end = self.span(start, start + size)
        missing = last - first - (end - begin)
        before = min(max(-first, 0), missing)
        return Frame(self.at, size, place, before, missing - before)


class Frame(NamedTuple):
    """A rank's share of a dim of space: `size` results from `place` on, of a window on the operand's elements.

    `before` and `behind`: how many of these elements are missing, as they are outside the whole.
    """

    at: int
    size: int
    place: int
    before: int
    behind: int


@dataclass(frozen=True)
class ShardRange:
    """The part of a factor that a rank holds: `size` elements from `offset`; `fraction` of the whole.

    A body gets the offset as a tensor without dims, whose value depends on the rank that runs the program.
    `frames`: of the factors that windows are over.
    """

    offset: Any
    size: Size
    fraction: float
    frames: tuple[Frame, ...] = ()

    @classmethod
    def of(
        cls,
        cuts: Sequence[tuple[DimSharding, Size]],
        mesh: Mesh,
        here: Mapping[str, int],
        windows: Sequence[Window | None] = (),
    ) -> ShardRange:
        """Return the range of factors, each with its size, that the rank at coordinate `here` holds."""
        shares = [cut.share(total, mesh, here) for cut, total in cuts]
        fractions = (
            size / total if isinstance(total, int) else 1 / mesh.size(cut.axes)
            for (cut, total), (_, size) in zip(cuts, shares, strict=True)
        )
        frames = (each.frame(*share) for each, share in zip(windows, shares, strict=False) if each is not None)
        return cls(*shares[0], math.prod(fractions), tuple(frames))


@dataclass(frozen=True, eq=False)
class Rule:
    """The rule of one node, or of equal calls: the pattern, and the size of every factor."""

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
    windows: Mapping[str, Window] = field(default_factory=dict)

    def over(self, factor: str) -> str | None:
        """Return the factor of the result whose windows are over this factor of an operand."""
        return next((made for made, window in self.windows.items() if window.factor == factor), None)

    def range_of(self, cuts: Mapping[str, DimSharding], mesh: Mesh, here: Mapping[str, int]) -> ShardRange:
        """Return the range that the body gets, of the factors that have one."""
        own = [factor for factor in cuts if factor in self.local]
        shares = [(cuts[factor], self.extent[factor]) for factor in own]
        return ShardRange.of(shares, mesh, here, [self.windows.get(factor) for factor in own])

    @property
    def skips_empty(self) -> bool:
        """True if a rank with an empty share of the output makes it without the op, which rejects empty shards."""
        operand_dims = {dim for term in self.pattern.inputs for dim in term}
        dims = [dim for term in self.pattern.outputs for dim in term]
        # A dynamic size is read off an operand that has it.
        readable = all(dim in operand_dims or all(isinstance(self.extent[f], int) for f in dim) for dim in dims)
        return self.shards == "nonempty" and len(self.pattern.outputs) == 1 and readable

    @cached_property
    def made(self) -> frozenset[str]:
        return frozenset(factor for term in self.pattern.outputs for dim in term for factor in dim)

    @cached_property
    def reduced(self) -> frozenset[str]:
        operand_factors = {factor for term in self.pattern.inputs for dim in term for factor in dim}
        return frozenset(factor for factor in operand_factors - self.made if not factor.startswith("_"))

    @cached_property
    def factors(self) -> tuple[str, ...]:
        """Every factor once, in the order of the text."""
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
    sums = tuple(frozenset(" ".join(re.findall(r"{([^}]*)}", part)).split()) for part in right.split(","))
    outputs = tuple(_term(re.sub(r"{[^}]*}", "", part), whole) for part in right.split(","))
    output_factors = {f for term in outputs for dim in term for f in dim}
    operand_factors = {f for term in inputs for dim in term for f in dim}
    return Pattern(
        tuple(inputs), outputs, frozenset(addends), frozenset(whole | (output_factors - operand_factors)), sums
    )


def extents(
    pattern: Pattern, shapes: Sequence[Sequence[Size]], known: Mapping[str, Size], what: str
) -> dict[str, Size]:
    """Return the size of every factor, from the shapes of operands and outputs.

    Raises:
        RuleError: a term and its tensor differ in their number of dims, or a size stays unknown.
    """
    terms = (*pattern.inputs, *pattern.outputs)
    if [len(t) for t in terms] != [len(s) for s in shapes]:
        raise RuleError(
            f"the rule of {what} has terms of {[len(t) for t in terms]} dims, "
            f"the tensors have {[len(s) for s in shapes]}",
            help="give every tensor operand and output one term with one entry per dim",
        )
    sizes = dict(known)
    pairs = [
        (dim, size) for term, shape in zip(terms, shapes, strict=True) for dim, size in zip(term, shape, strict=True)
    ]
    for dim, size in pairs:
        if len(dim) == 1:
            sizes.setdefault(dim[0], size)
    for dim, size in pairs:
        missing = [f for f in dim if f not in sizes]
        if len(missing) == 1 and not isinstance(dim, Joined):
            sizes[missing[0]] = size // math.prod(sizes.get(factor, 1) for factor in dim)
    unknown = {f for dim, _ in pairs for f in dim if f not in sizes}
    if unknown:
        raise RuleError(f"the rule of {what} leaves the sizes of {sorted(unknown)} open", help="give them as factors=")
    return sizes
