"""Leaves in a problem: what each may be by its constraint, its layer's style and its uses, and what it costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import numpy
import torch
from torch import fx

from tpcompiler._torch import sym_hint
from tpcompiler.cost.objective import local_bytes
from tpcompiler.ir import edit
from tpcompiler.ir.constraints import Allowed, AnyStyle, Dims, Exactly
from tpcompiler.ir.dim_sharding import DimSharding
from tpcompiler.ir.local import key
from tpcompiler.ir.names import layer_of, weight_of
from tpcompiler.ir.program import PlannedProgram, tied
from tpcompiler.ir.sharding import Sharding
from tpcompiler.rules.weight_features import feature_dims
from tpcompiler.solver.problem import NEVER, Layer, Problem, Values, in_units
from tpcompiler.solver.turn import Turn


@dataclass
class Leaf:
    """A tensor of the model, whatever names and programs share it, and its possible shardings so far.

    `is_followed`: values are placed as it is, as it is written or has a gradient. `before`: its sharding over the axes
    before. `shardings`: empty for one that takes the sharding that its uses want.
    """

    group: str
    allowed: Allowed
    is_followed: bool
    before: Sharding
    value: torch.Tensor
    has_gradient: bool = False
    shardings: dict[Sharding, None] = field(default_factory=dict)

    @property
    def is_fixed(self) -> bool:
        """True if a constraint places it."""
        return isinstance(self.allowed, Exactly | Dims)

    @property
    def within(self) -> Exactly | Dims | None:
        """The plan's entry for it, if that only narrows what the search may find."""
        return self.allowed.within if isinstance(self.allowed, AnyStyle) else None

    def start(self, turn: Turn) -> None:
        """Let it be what its constraint names, or as before if other values are placed as it is."""
        if isinstance(self.allowed, Exactly | Dims):
            is_whole = isinstance(self.allowed, Exactly) and len(self.allowed.shardings) == 1  # over all axes
            for asked in self.allowed.shardings:
                sharding = asked if is_whole else asked.axis_part(turn.axis).nest_in(self.before, {turn.axis})
                self.shardings.setdefault(turn.within(sharding, self.value))
        elif self.is_followed:
            self.let_be_whole()
        if turn.gathers:  # whole, or cut evenly along any dim, whatever its uses want
            self.let_be_whole()
            for dim, size in enumerate(self.value.shape if self.value.is_floating_point() else ()):
                cut = self.before.dims[dim].nest(DimSharding.by(turn.axis))
                if cut.is_even(size, turn.mesh):
                    self.shardings.setdefault(self.before.without_partial.with_dim(dim, cut))

    def want(self, sharding: Sharding, turn: Turn) -> None:
        """Let it be what a use wants, if its constraint leaves that open."""
        earlier = sharding.restrict_to(turn.axes[:-1], self.value.shape, turn.mesh)
        if sharding.partial or earlier != self.before:
            return
        is_open = not self.is_fixed and self.is_followed
        if is_open or (isinstance(self.allowed, Dims) and self.allowed.admits(sharding, turn.axis)):
            self.shardings.setdefault(sharding)

    def may_be(self, sharding: Sharding, turn: Turn) -> bool:
        """Return True unless the plan excludes a sharding; on a half of an axis, a style lets it be whole too."""
        within = self.within
        if within is None or not turn.is_searched or within.admits(sharding, turn.axis):
            return True
        halves = within.shardings[0].axes - {turn.axis}
        is_other = bool(halves - set(turn.axes) or halves & self.before.axes)
        return isinstance(within, Dims) and is_other and not sharding.dims_cut_by(turn.axis)

    def let_be_whole(self) -> None:
        self.shardings.setdefault(self.before)


def find_groups(programs: Sequence[PlannedProgram]) -> dict[fx.Node, str]:
    """Return the leaf behind each placeholder; tied names and programs share them."""
    first: dict[str, str] = {}
    groups: dict[fx.Node, str] = {}
    for program in programs:
        names, first_of = {node.name: fqn for node, fqn in program.leaves()}, tied(program)
        for node, fqn in program.leaves():
            groups[node] = first.setdefault(fqn, first.get(names[first_of[node.name]], names[first_of[node.name]]))
    return groups


def find_leaves(problem: Problem, turn: Turn, before: Mapping[str, Sharding]) -> list[dict[str, Leaf]]:
    """Return each program's leaves by the names of their placeholders."""
    allowed: dict[str, Allowed] = {}
    leading, graded = set[str](), set[str]()
    for program in problem.programs:
        followed, with_gradient = {n for _, n in program.followers()}, {n for _, n in program.gradients()}
        for node, fqn in program.leaves():
            group, constraint = problem.groups[node], program.constraints.get(node.name)
            if constraint is not None and constraint.request is not None:
                allowed.setdefault(group, constraint.allowed)
            if fqn in followed:
                leading.add(group)
            if fqn in with_gradient:
                graded.add(group)
    made: dict[str, Leaf] = {}
    for node, group in problem.groups.items():
        if group not in made:
            known, value = before.get(group, Sharding.replicated(edit.ndim(node))), edit.fake(node)
            asked = allowed.get(group, turn.rest)
            made[group] = Leaf(group, asked, group in leading, known, value, group in graded)
            made[group].start(turn)
    return [{node.name: made[problem.groups[node]] for node, _ in program.leaves()} for program in problem.programs]


def add_layers(problem: Problem) -> None:
    """Add a layer for each module whose weight no plan names, with the styles that its uses show.

    Where a module has several weights, or its weight several dims of features, the dims of each weight.
    """
    for domain in problem.domains:
        leaves = dict(domain.program.leaves())
        largest: dict[str, tuple[int, fx.Node]] = {}  # part of each weight: the scales of a quantised one follow it
        for node, fqn in leaves.items():
            value, weight = edit.fake(node), weight_of(fqn)
            if value.ndim > 1 and problem.groups[node] == fqn:
                largest[weight] = max(largest.get(weight, (0, node)), (value.numel(), node), key=itemgetter(0))
        weights = {
            node: fqn
            for _, node in largest.values()
            if (fqn := leaves[node]) not in problem.layers and _has_style(domain.leaves[node.name])
            if layer_of(fqn)
        }
        owned = Counter(map(layer_of, weights.values()))
        for node, fqn in weights.items():
            owner = layer_of(fqn)
            nodes = [other for other in leaves if problem.groups[other] == fqn]
            sides = {
                "colwise": feature_dims(nodes, "out", domain.static, owner),
                "rowwise": feature_dims(nodes, "in", domain.static, owner),
            }
            if any(sides.values()):
                styles = _styles_of(edit.fake(node), sides, problem.turn, owned[owner] == 1)
                name = owner if "replicate" in styles else weight_of(fqn)
                problem.owners.add(owner)
                problem.layers[fqn] = Layer(name, problem.tables.variable(len(styles)), styles)


def _has_style(leaf: Leaf) -> bool:
    """Return True if a style of its layer may place a leaf: no constraint does, and no value that is written to it."""
    return not leaf.shardings or (leaf.has_gradient and not leaf.is_fixed)


def _styles_of(value: Any, sides: Mapping[str, Set[int]], turn: Turn, is_alone: bool) -> dict[str, int | None]:
    degree = turn.mesh.degree(turn.axis)
    large = [dim for dim, size in enumerate(value.shape) if sym_hint(size) >= degree]
    if is_alone and all(len(dims) <= 1 for dims in sides.values()):
        return {**{style: dim for style, dims in sides.items() for dim in dims if dim in large}, "replicate": None}
    return {**{f"S({dim})": dim for dim in large}, "R": None}


def add_leaf(problem: Problem, node: fx.Node, leaf: Leaf) -> None:
    """Add a leaf that has a say: a variable for what it may be, and the price of holding it so."""
    if leaf.group not in problem.leaves and leaf.shardings:
        values = problem.leaves[leaf.group] = problem.variable(tuple(leaf.shardings))
        _hold(problem, node, values)
        if leaf.within is not None:
            allowed = [leaf.may_be(sharding, problem.turn) for sharding in values.shardings]
            problem.price([values], numpy.where(allowed, 0.0, NEVER))
        if (layer := problem.layers.get(leaf.group)) is not None:
            cuts = [own.axis_part(problem.turn.axis) for own in values.shardings]
            fits = [[_is_cut(cut, dim) for cut in cuts] for dim in layer.styles.values()]
            problem.price([Values(layer.variable, ()), values], numpy.where(fits, 0.0, NEVER))
    if leaf.group in problem.leaves:
        problem.values[node] = problem.leaves[leaf.group]


def price_use(problem: Problem, leaf: fx.Node, fqn: str, wanted: Values, placed: Leaf) -> None:
    """Price a use of a leaf without a say: it is what the use wants, if its layer's style says so too. It is held once.

    A style that is kept to is one of the layer's weight, which its other leaves follow.
    """
    group, turn = problem.groups[leaf], problem.turn
    layer = problem.layers.get(group)
    is_priced = group in problem.priced
    problem.priced.add(group)
    is_fixed = turn.is_searched and layer is None and weight_of(fqn) == fqn and not edit.fake(leaf).is_floating_point()
    styles = None if layer is None else tuple(layer.styles.values())
    follows = isinstance(placed.within, Dims) and layer is None and layer_of(fqn) in problem.owners
    allowed = tuple(follows or placed.may_be(want, turn) for want in wanted.shardings)
    if is_fixed:
        allowed = tuple(want.is_replicated for want in wanted.shardings)
    elif not is_priced:
        _hold(problem, leaf, wanted)

    def find() -> numpy.ndarray:
        if styles is None:
            return numpy.where(allowed, 0.0, NEVER)
        fits = [[_is_cut(want.axis_part(turn.axis), dim) for want in wanted.shardings] for dim in styles]
        return numpy.where(numpy.logical_and(fits, allowed), 0.0, NEVER)

    known = "use", key(leaf), wanted.shardings, styles, allowed
    problem.price([wanted] if layer is None else [Values(layer.variable, ()), wanted], problem.known.once(known, find))


def _hold(problem: Problem, node: fx.Node, values: Values) -> None:
    """Price a leaf in each of its shardings: of its bytes, and at rest of gathering it for its uses."""
    value, mesh, machine = edit.fake(node), problem.turn.mesh, problem.objective.machine
    gathers = problem.resting.get(node)

    def find() -> tuple[numpy.ndarray, numpy.ndarray]:
        used = numpy.array([float(local_bytes(value, each, mesh)) for each in values.shardings])
        if gathers is None:
            return used, numpy.zeros_like(used)
        held = used / mesh.size(gathers.axes)
        sent = [machine.collective_seconds("all_gather", gathers.axes, count, mesh) for count in used - held]
        return held, in_units(gathers.times * numpy.array(sent))

    held, units = problem.known.once(("held", key(node), values.shardings, gathers), find)
    problem.price([values], held, problem.storage)
    if gathers is not None:
        problem.price([values], units)


def _is_cut(sharding: Sharding, dim: int | None) -> bool:
    """True if a sharding shards this dim only, or no dim."""
    dims = [] if dim is None else [dim]
    return [at for at, how in enumerate(sharding.dims) if how.axes] == dims and not sharding.partial
