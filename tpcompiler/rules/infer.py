"""The ONE algorithm behind every rule: from factors cut by mesh axes to shardings of tensors, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tpcompiler._torch import statically_equal
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.sharding import WHOLE, DimSharding, Sharding, Size, chunk, divides
from tpcompiler.rules.notation import Dim, Rule, Term

INNER = "it would cut two parts of one dim, or a dynamic number of blocks unevenly, or blocks of a dynamic size"


@dataclass(frozen=True)
class Option:
    """One way to run an op sharded: factors cut by axes, and Partial operands passed through.

    `cuts`: factor -> how it is cut, as a dim by itself. `through`: axis -> (reduce op, operands Partial on it).
    """

    cuts: Mapping[str, DimSharding] = field(default_factory=dict)
    through: Mapping[str, tuple[str, frozenset[int]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Refusal:
    """Why a sharding of an operand cannot be kept."""

    text: str


def _minor(rule: Rule, dim: Dim, factor: str) -> Size:
    """The product of the factors inside `factor` in a compound dim."""
    product: Size = 1
    for inner in dim[dim.index(factor) + 1 :]:
        product = product * rule.extent[inner]
    return product


def _outer(rule: Rule, dim: Dim) -> str | None:
    """The outermost factor of more than one element: only it can be cut without striding."""
    return next((f for f in dim if not (isinstance(rule.extent[f], int) and rule.extent[f] == 1)), None)


def _cut_factor(rule: Rule, dim: Dim, cut: DimSharding) -> tuple[str, int] | Refusal:
    """The factor that this cut of a merged dim cuts, and the block of the factor in which it does (0: all of it)."""
    if not cut.block:
        factor = _outer(rule, dim)
        return (factor, 0) if factor is not None else Refusal("it has one element")
    inside: Size = 1
    for factor in reversed(dim):
        size = rule.extent[factor]
        block, rest = divmod(cut.block, inside)
        if rest:
            break
        if statically_equal(size, block):
            return factor, 0
        if block > 1 and divides(size, block):
            return factor, block
        if not isinstance(size, int):
            break
        inside *= size
    return Refusal(f"it is cut in blocks of {cut.block}, which the op takes apart otherwise")


def follow(rule: Rule, term: Term, sharding: Sharding, mesh: Mesh) -> Option | Refusal:
    """The option that keeps a tensor (operand or output) with this term as it is sharded."""
    cuts: dict[str, DimSharding] = {}
    for position, (dim, cut) in enumerate(zip(term, sharding.dims, strict=True)):
        if not cut.axes:
            continue
        found = _cut_factor(rule, dim, cut)
        if isinstance(found, Refusal):
            return Refusal(f"dim {position}: {found.text}")
        factor, block = found
        degree = mesh.degree(cut.axes[0])
        minor = _minor(rule, dim, factor)
        size = block or rule.extent[factor]
        if cut.unit == 1 and divides(size, degree):
            cuts[factor] = DimSharding(cut.axes, 1, block)
        elif isinstance(minor, int) and cut.unit % minor == 0:
            cuts[factor] = DimSharding(cut.axes, cut.unit // minor, block)
        else:
            return Refusal(f"dim {position} splits into {size} x {minor}, and {size} is not divisible by {degree}")
        if refusal := _check(rule, factor, cuts[factor], mesh):
            return refusal
    return Option(cuts)


def _check(rule: Rule, factor: str, cut: DimSharding, mesh: Mesh) -> Refusal | None:
    size = rule.extent[factor]
    degree = mesh.degree(cut.axes[0])
    if factor in rule.pattern.whole:
        return Refusal(f"it needs the dim of {size} whole")
    if cut.block and factor in rule.local:
        return Refusal(f"its own body takes no dim that is cut in blocks of {cut.block}")
    if not isinstance(size, int):
        if cut.is_even(size, mesh):
            return None
        return Refusal(f"the dim of {size} is dynamic, and need not be a multiple of {degree * cut.unit}")
    pieces = [chunk(cut.block or size, degree, index, cut.unit)[1] for index in range(degree)]
    policy = "nonempty" if factor in rule.local and rule.shards == "any" else rule.shards
    if policy == "even" and len(set(pieces)) > 1:
        return Refusal(f"it needs shards of one size, and {cut.block or size} is not divisible by {degree}")
    if policy == "nonempty" and 0 in pieces:
        return Refusal(f"it needs shards that are not empty, and {size} over {degree} leaves {pieces.count(0)} empty")
    return None


def pass_through(rule: Rule, index: int, axis: str, reduce_op: str) -> Option | Refusal:
    """The option that keeps operand `index` Partial: the op must be linear in it."""
    for group in rule.linear:
        if index in group and reduce_op in ("sum", "avg"):
            return Option(through={axis: (reduce_op, group)})
    return Refusal(f"it is not linear in operand {index}, which is a pending {reduce_op}")


def merge(options: Sequence[Option]) -> Option | None:
    """Options on different axes taken together; None when they collide."""
    cuts: dict[str, DimSharding] = {}
    through: dict[str, tuple[str, frozenset[int]]] = {}
    for option in options:
        for factor, cut in option.cuts.items():
            if cuts.setdefault(factor, cut) != cut:
                return None
        through.update(option.through)
    axes = [axis for cut in cuts.values() for axis in cut.axes] + list(through)
    return Option(cuts, through) if len(axes) == len(set(axes)) else None


def _cut(rule: Rule, term: Term, option: Option, mesh: Mesh) -> tuple[DimSharding, ...] | None:
    dims = []
    for dim in term:
        inside = [f for f in dim if f in option.cuts]
        if not inside:
            dims.append(WHOLE)
            continue
        factor = inside[0]
        cut, minor = option.cuts[factor], _minor(rule, dim, factor)
        block = cut.block * minor
        if factor != _outer(rule, dim):
            block = (cut.block or rule.extent[factor]) * minor
        even = cut.unit == 1 and divides(cut.block or rule.extent[factor], mesh.degree(cut.axes[0]))
        if len(inside) > 1 or not isinstance(block, int):
            return None
        if block and not even and not all(isinstance(rule.extent[f], int) for f in dim):
            return None  # from an empty shard nobody could tell how many blocks there are
        dims.append(DimSharding(cut.axes, 1 if even or not isinstance(minor, int) else cut.unit * minor, block))
    return tuple(dims)


def shardings(rule: Rule, option: Option, mesh: Mesh) -> tuple[tuple[Sharding, ...], tuple[Sharding, ...]] | Refusal:
    """What the option needs of every operand, and what every output becomes."""
    for factor, cut in option.cuts.items():
        if refusal := _check(rule, factor, cut, mesh):
            return refusal
    pending = {axis: rule.reduce for factor, cut in option.cuts.items() if factor in rule.reduced for axis in cut.axes}
    if any(op != "sum" for op in pending.values()) and rule.pattern.addends:
        return Refusal("an addend beside a reduction other than sum")
    wants = []
    for index, term in enumerate(rule.pattern.inputs):
        dims = _cut(rule, term, option, mesh)
        if dims is None:
            return Refusal(INNER)
        partial = {axis: op for axis, op in pending.items() if index in rule.pattern.addends}
        partial.update({axis: op for axis, (op, group) in option.through.items() if index in group})
        wants.append(Sharding(dims, tuple(sorted(partial.items()))))
    made = []
    for term in rule.pattern.outputs:
        dims = _cut(rule, term, option, mesh)
        if dims is None:
            return Refusal(INNER)
        partial = {**pending, **{axis: op for axis, (op, _) in option.through.items()}}
        made.append(Sharding(dims, tuple(sorted(partial.items()))))
    return tuple(wants), tuple(made)


def options(rule: Rule, mesh: Mesh) -> Iterator[Option]:
    """Every way to run the op on a mesh of one axis: whole, one factor cut, or one linear group passed through."""
    yield Option()
    for axis in mesh.names:
        for factor in rule.factors:
            option = Option({factor: DimSharding((axis,))})
            if not isinstance(shardings(rule, option, mesh), Refusal):
                yield option
        for group in rule.linear:
            yield Option(through={axis: ("sum", group)})


def pull_back(rule: Rule, sharding: Sharding, mesh: Mesh) -> Sharding | None:
    """The sharding of a one-operand op's operand that gives its output this sharding, if there is one."""
    option = follow(rule, rule.pattern.outputs[0], sharding.settled(), mesh)
    if isinstance(option, Refusal):
        return None
    both = shardings(rule, option, mesh)
    if isinstance(both, Refusal) or both[1][0] != sharding.settled():
        return None
    if any(isinstance(pass_through(rule, 0, axis, op), Refusal) for axis, op in sharding.partial):
        return None
    return Sharding(both[0][0].dims, sharding.partial)
