"""The one algorithm behind every rule: from factors sharded over mesh axes to shardings of tensors, and back."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from tpcompiler.ir.dim_sharding import WHOLE, DimSharding, Level, Size, chunk, divides
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.sharding import Sharding
from tpcompiler.ir.sizes import statically_equal
from tpcompiler.rules.notation import Dim, Joined, Rule, Term

INNER = "it would cut two parts of one dim, or a dynamic number of blocks unevenly, or blocks of a dynamic size"


@dataclass(frozen=True)
class Option:
    """One way to run an op sharded: factors sharded over axes, and Partial operands passed through.

    `cuts`: factor -> its sharding as a dim by itself. `through`: axis -> (reduce op, operands Partial on it).
    """

    cuts: Mapping[str, DimSharding] = field(default_factory=dict)
    through: Mapping[str, tuple[str, frozenset[int]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Refusal:
    """The reason why an operand's sharding cannot be kept."""

    text: str


def is_one(size: Size) -> bool:
    return isinstance(size, int) and size == 1


def _take_apart(rule: Rule, dim: Dim, cut: DimSharding, mesh: Mesh) -> dict[str, DimSharding] | Refusal:
    """Distribute the cut of a dim over its factors, axis by axis, outermost first."""
    if (under := _under_windows(rule, dim, cut, mesh)) is not None:
        return under
    if cut.spans:
        return Refusal("is in spans, which the op does not need")
    if isinstance(dim, Joined):
        return _between(rule, dim, cut)
    if cut.parts:
        factor = _outer(rule, dim)
        minor = math.prod(rule.extent[f] for f in dim[dim.index(factor) + 1 :]) if factor is not None else None
        if factor is not None and isinstance(minor, int) and minor:
            parts = cut.unscale(minor, rule.extent[factor] * minor, mesh)
            if parts is not None:
                return {factor: parts}
        return Refusal("is cut in parts, which the op takes apart otherwise")
    cuts: dict[str, DimSharding] = {}
    left = {factor: rule.extent[factor] for factor in dim}  # after the axes so far, in one piece
    uneven: set[str] = set()  # here `left` is the largest piece; a divisor of it need not divide the others
    first = 0  # factors outside this one are not sharded any more
    for axis, block, its in cut.levels:
        choice = _cut_factor(rule, dim[first:] if not block else dim, left, block, its)
        if isinstance(choice, Refusal):
            return choice
        factor, own = choice
        size, deals, pieces = own or left[factor], mesh.deals(axis), mesh.pieces(axis)
        minor = math.prod(left[f] for f in dim[dim.index(factor) + 1 :])
        if refusal := _unequal(size, [axis], mesh):
            return refusal
        if its == 1 and divides(size, pieces) and (own or factor not in uneven):
            unit = 1
        elif isinstance(minor, int) and its % minor == 0:
            unit = its // minor
        else:
            return Refusal(f"splits into {size} x {minor}, and {_not_divisible(size, mesh.degree(axis))}")
        if own and factor in uneven and cuts[factor].levels[-1].unit % own:
            return Refusal(f"has uneven shards, which blocks of {own} do not divide")
        cuts[factor] = DimSharding((*cuts.get(factor, WHOLE).levels, Level(axis, own, unit)))
        even = DimSharding.by(axis, unit=unit).is_even(size, mesh)
        left[factor] = size // mesh.degree(axis) if even else _largest(size, deals, unit)
        uneven |= set() if even else {factor}
        first = dim.index(factor)
    return cuts


def _under_windows(rule: Rule, dim: Dim, cut: DimSharding, mesh: Mesh) -> dict[str, DimSharding] | None:
    """Return the cut of the factor whose windows need just these elements on every rank."""
    is_run = bool(cut.levels) and not any(level.block for level in cut.levels)
    if not is_run or len(dim) != 1 or (made := rule.over(dim[0])) is None:
        return None
    plain = cut.without_spans
    return {made: plain} if _spans(rule, made, plain, mesh) == cut else None


def _spans(rule: Rule, made: str, cut: DimSharding, mesh: Mesh) -> DimSharding:
    """Return the cut of an operand's dim for the windows of a factor that is cut: in spans, unless shares suffice."""
    window, spans, is_plain = rule.windows[made], [], True
    for here in cut.coordinates(mesh):
        start, size = cut.share(rule.extent[made], mesh, here)
        spans.append(window.span(start, start + size))
        frame, (begin, length) = window.frame(start, size), cut.share(window.size, mesh, here)
        is_plain &= spans[-1] == (begin, begin + length) and not (frame.before or frame.behind or frame.place)
    return cut if is_plain else cut.with_spans(spans)


def _not_divisible(size: Size, degree: int) -> str:
    """Describe the misfit, with the degrees that would fit and the cost of padding."""
    text = f"{size} is not divisible by {degree}"
    if not isinstance(size, int):
        return text
    works = [str(d) for d in range(2, size + 1) if size % d == 0]
    padded = -(-size // degree) * degree
    more = f"padded to {padded} it would be {padded / size:.2f} times as large"
    return f"{text} (it is by {', '.join(works) or 'none'}; {more})"


def _between(rule: Rule, dim: Joined, cut: DimSharding) -> dict[str, DimSharding] | Refusal:
    """Return the cuts of factors in a row."""
    cuts, at, size = {}, 0, sum(rule.extent[factor] for factor in dim)
    for factor in dim:
        piece = cut.slice(at, at + rule.extent[factor], size)
        if piece is None:
            return Refusal(f"is cut across the parts of {', '.join(str(rule.extent[f]) for f in dim)} in it")
        at += rule.extent[factor]
        if piece.axes:
            cuts[factor] = piece
    return cuts


def _outer(rule: Rule, dim: Dim) -> str | None:
    """Return the outermost factor of more than one element: only it can be sharded without striding."""
    return next((f for f in dim if not is_one(rule.extent[f])), None)


def _largest(size: Size, deals: int | tuple[int, ...], unit: int = 1) -> Size:
    """Return the share of the first rank, which is the largest; of a dynamic size that need not be even, a bound."""
    if isinstance(size, int) or isinstance(deals, tuple):
        return chunk(size, deals, 0, unit)[1]
    return -(-size // (deals * unit)) * unit


def _unequal(size: Size, axes: Iterable[str], mesh: Mesh) -> Refusal | None:
    if isinstance(size, int) or not mesh.is_unequal(axes):
        return None
    return Refusal(f"the dim of {size} is dynamic, and {mesh} has unequal shares, which cut static dims only")


def _cut_factor(rule: Rule, dim: Dim, left: Mapping[str, Size], block: int, unit: int) -> tuple[str, int] | Refusal:
    """Return the factor that an axis shards when it shards a merged dim in such blocks and units, and its block there.

    An axis may shard a factor of which others have left one element: a unit of all that is inside of it tells. Of a dim
    of one element it shards a factor that need not stay whole.
    """
    if not block:
        inner = [math.prod(left[f] for f in dim[at + 1 :]) for at in range(len(dim))]
        taken = (unit != 1 and statically_equal(size, unit) for size in inner)
        own = (f for f, is_unit in zip(dim, taken, strict=True) if is_unit or not is_one(left[f]))
        free = (f for f in dim if f not in rule.pattern.whole)
        factor = next(own, next(free, dim[0] if dim else None))
        return (factor, 0) if factor is not None else Refusal("has one element")
    inside: Size = 1
    for factor in reversed(dim):
        size = left[factor]
        own, rest = divmod(block, inside)
        if rest:
            break
        if statically_equal(size, own):
            return factor, 0
        if own and divides(size, own):
            return factor, own
        if not isinstance(size, int):
            break
        inside *= size
    return Refusal(f"is cut in blocks of {block}, which the op takes apart otherwise")


def follow(rule: Rule, term: Term, sharding: Sharding, mesh: Mesh) -> Option | Refusal:
    """Return the option that keeps a tensor (operand or output) with this term as it is sharded."""
    cuts: dict[str, DimSharding] = {}
    for position, (dim, cut) in enumerate(zip(term, sharding.dims, strict=True)):
        if not cut.axes:
            continue
        factors = _take_apart(rule, dim, cut, mesh)
        if isinstance(factors, Refusal):
            return Refusal(f"dim {position} {factors.text}")
        cuts.update(factors)
        for factor in factors:
            if refusal := _check(rule, factor, cuts[factor], mesh):
                return refusal
    return Option(cuts)


def _check(rule: Rule, factor: str, cut: DimSharding, mesh: Mesh) -> Refusal | None:
    size = rule.extent[factor]
    degree = mesh.size(cut.axes)
    if factor in rule.pattern.whole:
        return Refusal(f"it needs the dim of {size} whole")
    if factor in rule.local and (cut.parts or cut.spans or any(level.block for level in cut.levels)):
        return Refusal("its own body takes no dim that is cut in blocks or parts")
    if factor in rule.reduced and any(set(how.axes) != set(cut.axes) for _, how in cut.parts):
        return Refusal(f"it sums over the dim of {size}, parts of which are on several ranks at once")
    if refusal := _unequal(size, cut.axes, mesh):
        return refusal
    if why := cut.find_misfit(size, mesh):
        return Refusal(f"in its dim of {size}, {why}")
    if not isinstance(size, int):
        if cut.is_even(size, mesh):
            return None
        multiple = degree * max(level.unit for level in cut.levels)
        return Refusal(f"the dim of {size} is dynamic, and need not be a multiple of {multiple}")
    pieces = [cut.local_size(size, mesh, here) for here in _coordinates(cut.axes, mesh)]
    policy = rule.local_shards if factor in rule.local and rule.shards == "any" else rule.shards
    if policy == "even" and len(set(pieces)) > 1:
        why = f"{mesh} is unequal" if mesh.is_unequal(cut.axes) else _not_divisible(cut.block or size, degree)
        return Refusal(f"it needs shards of one size, and {why}")
    skips = rule.skips_empty and factor in rule.made and factor not in rule.windows
    if policy == "nonempty" and 0 in pieces and not skips:
        return Refusal(f"it needs shards that are not empty, and {size} over {degree} leaves {pieces.count(0)} empty")
    return None


@lru_cache
def _coordinates(axes: tuple[str, ...], mesh: Mesh) -> list[dict[str, int]]:
    places = itertools.product(*(range(mesh.degree(axis)) for axis in axes))
    return [dict(zip(axes, place, strict=True)) for place in places]


def pass_through(rule: Rule, index: int, axis: str, reduce_op: str) -> Option | Refusal:
    """Return the option that keeps operand `index` Partial, which requires an op that is linear in it."""
    for group in rule.linear:
        if index in group and reduce_op in ("sum", "avg"):
            return Option(through={axis: (reduce_op, group)})
    return Refusal(f"it is not linear in operand {index}, which is a pending {reduce_op}")


def merge(options: Sequence[Option]) -> Option | None:
    """Combine options into one; None if they contradict each other on a factor or axis."""
    cuts: dict[str, DimSharding] = {}
    through: dict[str, tuple[str, frozenset[int]]] = {}
    for option in options:
        for factor, cut in option.cuts.items():
            if cuts.setdefault(factor, cut) != cut:
                return None
        for axis, passed in option.through.items():
            if through.setdefault(axis, passed) != passed:
                return None
    return Option(cuts, through)


def _cut(rule: Rule, dim: Dim, option: Option, mesh: Mesh) -> DimSharding | None:
    """Return the cut of a dim that follows from the cuts of its factors."""
    if len(dim) == 1 and (made := rule.over(dim[0])) is not None and made in option.cuts:
        return _spans(rule, made, option.cuts[made], mesh)
    if option.cuts.keys().isdisjoint(dim):
        return WHOLE
    if isinstance(dim, Joined):
        return DimSharding.of_parts([(rule.extent[f], option.cuts.get(f, WHOLE)) for f in dim])
    levels: list[Level] = []
    outer: Size = 1  # the outer factors' remainder after the axes so far, at the first coordinate
    even = True
    for position, factor in enumerate(dim):
        cut, remainder = option.cuts.get(factor, WHOLE), rule.extent[factor]
        minor = math.prod(rule.extent[f] for f in dim[position + 1 :])
        if cut.parts:
            alone = not levels and is_one(outer) and option.cuts.keys().isdisjoint(dim[position + 1 :])
            return cut.scale(minor, remainder, mesh) if alone and isinstance(minor, int) else None
        alike = True  # True while all pieces of the factor have one size
        for at, (axis, own, unit) in enumerate(cut.levels):
            block = 0 if not own and (at or (is_one(outer) and even)) else (own or remainder) * minor
            piece, deals = own or remainder, mesh.deals(axis)
            fits = unit == 1 and divides(piece, mesh.pieces(axis)) and (bool(own) or alike)
            alike = fits and isinstance(deals, int)
            if not isinstance(block, int) or not (isinstance(minor, int) or (fits and isinstance(deals, int))):
                return None  # a dynamic number of elements is dealt out in equal shares only
            levels.append(Level(axis, block, 1 if fits else unit * minor))
            even = even and alike
            remainder = piece // deals if fits and isinstance(deals, int) else _largest(piece, deals)
        outer = outer * remainder
    blocked = any(level.block for level in levels)
    if blocked and not even and not all(isinstance(rule.extent[factor], int) for factor in dim):
        return None  # an empty shard would not show how many blocks there are
    found = DimSharding(tuple(levels))
    return found.simplify(math.prod(rule.extent[factor] for factor in dim), mesh) if blocked else found


def _sharding(rule: Rule, term: Term, option: Option, partial: Mapping[str, str], mesh: Mesh) -> Sharding | Refusal:
    dims = []
    for dim in term:
        cut = _cut(rule, dim, option, mesh)
        if cut is None:
            return Refusal(INNER)
        dims.append(cut)
    axes = [axis for cut in dims for axis in cut.axes] + list(partial)
    if len(axes) != len(set(axes)):
        return Refusal("one mesh axis would cut two dims of a tensor")
    return Sharding(tuple(dims), tuple(sorted(partial.items())))


def shardings(rule: Rule, option: Option, mesh: Mesh) -> tuple[tuple[Sharding, ...], tuple[Sharding, ...]] | Refusal:
    """Return the sharding that the option needs of every operand, and the sharding that every output gets."""
    for factor, cut in option.cuts.items():
        if refusal := _check(rule, factor, cut, mesh):
            return refusal
    if len({rule.local[factor] for factor in option.cuts if factor in rule.local}) > 1:
        return Refusal("dims that have separate bodies would be cut at once")
    pending = {axis: rule.reduce for factor, cut in option.cuts.items() if factor in rule.reduced for axis in cut.axes}
    if any(op != "sum" for op in pending.values()) and rule.pattern.addends:
        return Refusal("an addend next to a reduction other than sum")
    passed = {axis: op for axis, (op, _) in option.through.items()}
    if passed.keys() & pending.keys():  # a product of two sums over the ranks would lack the cross terms
        return Refusal("it sums over a dim that is cut by the axis over which another operand is pending")
    wants, outputs = [], []
    for index, term in enumerate(rule.pattern.inputs):
        partial = {axis: op for axis, op in pending.items() if index in rule.pattern.addends}
        partial.update({axis: op for axis, (op, group) in option.through.items() if index in group})
        wants.append(_sharding(rule, term, option, partial, mesh))
    for term, sums in zip(rule.pattern.outputs, rule.pattern.sums, strict=True):
        own = {axis: "sum" for factor, cut in option.cuts.items() if factor in sums for axis in cut.axes}
        if own.keys() & passed.keys():
            return Refusal("it sums over a dim that is cut by the axis over which an operand is pending")
        outputs.append(_sharding(rule, term, option, {**pending, **own, **passed}, mesh))
    for each in (*wants, *outputs):
        if isinstance(each, Refusal):
            return each
    return tuple(wants), tuple(outputs)  # type: ignore[arg-type]


def options(rule: Rule, mesh: Mesh) -> Iterator[Option]:
    """Yield every way to run the op over one axis: whole, one factor sharded, or one linear group passed through."""
    yield Option()
    for axis in mesh.names:
        for option in candidates(rule, axis):
            if option.through or not isinstance(shardings(rule, option, mesh), Refusal):
                yield option


def candidates(rule: Rule, axis: str) -> Iterator[Option]:
    """Yield every way to shard one factor over an axis or to pass one linear group through, if the rule allows it."""
    for factor in rule.factors:
        yield Option({factor: DimSharding.by(axis)})
    for group in rule.linear:
        yield Option(through={axis: ("sum", group)})


def restricted(option: Option, axis: str) -> Option:
    """Return the part of the option over this axis."""
    cuts = {factor: only for factor, cut in option.cuts.items() if (only := cut.axis_part(axis)).axes}
    return Option(cuts, {a: passed for a, passed in option.through.items() if a == axis})
