"""The ONE algorithm behind every rule: from factors cut by mesh axes to shardings of tensors, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.sharding import WHOLE, DimSharding, Sharding, Size, chunk, divides
from tpcompiler.rules.notation import Dim, Rule, Term


@dataclass(frozen=True)
class Option:
    """One way to run an op sharded: factors cut by axes, and Partial operands passed through.

    `cuts`: factor -> (axis, unit). `through`: axis -> (reduce op, operands that are Partial on it).
    """

    cuts: Mapping[str, tuple[str, int]] = field(default_factory=dict)
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


def follow(rule: Rule, term: Term, sharding: Sharding, mesh: Mesh) -> Option | Refusal:
    """The option that keeps a tensor (operand or output) with this term as it is sharded."""
    cuts: dict[str, tuple[str, int]] = {}
    for position, (dim, cut) in enumerate(zip(term, sharding.dims, strict=True)):
        if not cut.axes:
            continue
        axis = cut.axes[0]
        degree = mesh.degree(axis)
        factor = _outer(rule, dim)
        if factor is None or len(cut.axes) > 1:
            return Refusal(f"dim {position} has one element")
        minor = _minor(rule, dim, factor)
        size = rule.extent[factor]
        if cut.unit == 1 and divides(size, degree):
            cuts[factor] = (axis, 1)
        elif isinstance(minor, int) and cut.unit % minor == 0:
            cuts[factor] = (axis, cut.unit // minor)
        else:
            return Refusal(f"dim {position} splits into {size} x {minor}, and {size} is not divisible by {degree}")
        if refusal := _check(rule, factor, *cuts[factor], mesh):
            return refusal
    return Option(cuts)


def _check(rule: Rule, factor: str, axis: str, unit: int, mesh: Mesh) -> Refusal | None:
    size = rule.extent[factor]
    degree = mesh.degree(axis)
    if factor in rule.pattern.whole:
        return Refusal(f"it needs the dim of {size} whole")
    if not isinstance(size, int):
        if divides(size, degree * unit):
            return None
        return Refusal(f"the dim of {size} is dynamic, and need not be a multiple of {degree * unit}")
    pieces = [chunk(size, degree, index, unit)[1] for index in range(degree)]
    policy = "nonempty" if factor in rule.local and rule.shards == "any" else rule.shards
    if policy == "even" and len(set(pieces)) > 1:
        return Refusal(f"it needs shards of one size, and {size} is not divisible by {degree}")
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
    cuts: dict[str, tuple[str, int]] = {}
    through: dict[str, tuple[str, frozenset[int]]] = {}
    for option in options:
        for factor, cut in option.cuts.items():
            if cuts.setdefault(factor, cut) != cut:
                return None
        through.update(option.through)
    axes = [axis for axis, _ in cuts.values()] + list(through)
    return Option(cuts, through) if len(axes) == len(set(axes)) else None


def _cut(rule: Rule, term: Term, option: Option, mesh: Mesh) -> tuple[DimSharding, ...] | None:
    dims = []
    for dim in term:
        inside = [f for f in dim if f in option.cuts]
        if not inside:
            dims.append(WHOLE)
            continue
        factor = inside[0]
        if len(inside) > 1 or factor != _outer(rule, dim):
            return None  # cutting an inner factor strides through the dim
        axis, unit = option.cuts[factor]
        minor = _minor(rule, dim, factor)
        even = unit == 1 and divides(rule.extent[factor], mesh.degree(axis))
        dims.append(DimSharding((axis,), 1 if even or not isinstance(minor, int) else unit * minor))
    return tuple(dims)


def shardings(rule: Rule, option: Option, mesh: Mesh) -> tuple[tuple[Sharding, ...], tuple[Sharding, ...]] | Refusal:
    """What the option needs of every operand, and what every output becomes."""
    for factor, (axis, unit) in option.cuts.items():
        if refusal := _check(rule, factor, axis, unit, mesh):
            return refusal
    pending = {axis: rule.reduce for factor, (axis, _) in option.cuts.items() if factor in rule.reduced}
    if any(op != "sum" for op in pending.values()) and rule.pattern.addends:
        return Refusal("an addend beside a reduction other than sum")
    wants = []
    for index, term in enumerate(rule.pattern.inputs):
        dims = _cut(rule, term, option, mesh)
        if dims is None:
            return Refusal("it would cut an inner part of a merged dim")
        partial = {axis: op for axis, op in pending.items() if index in rule.pattern.addends}
        partial.update({axis: op for axis, (op, group) in option.through.items() if index in group})
        wants.append(Sharding(dims, tuple(sorted(partial.items()))))
    made = []
    for term in rule.pattern.outputs:
        dims = _cut(rule, term, option, mesh)
        if dims is None:
            return Refusal("it would cut an inner part of a merged dim")
        partial = {**pending, **{axis: op for axis, (op, _) in option.through.items()}}
        made.append(Sharding(dims, tuple(sorted(partial.items()))))
    return tuple(wants), tuple(made)


def options(rule: Rule, mesh: Mesh) -> Iterator[Option]:
    """Every way to run the op on a mesh of one axis: whole, one factor cut, or one linear group passed through."""
    yield Option()
    for axis in mesh.names:
        for factor in rule.factors:
            option = Option({factor: (axis, 1)})
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
