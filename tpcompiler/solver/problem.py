"""The placements of programs as a problem: what every op may do, what each weight may be, and what all of it costs."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import numpy
import torch
from torch import fx

from tpcompiler._torch import aten, sym_hint
from tpcompiler.cost.kernels import NO_KERNEL, Kernel, find_kernels
from tpcompiler.cost.objective import Objective, local_bytes, local_work
from tpcompiler.ir import edit
from tpcompiler.ir.backward import is_backward
from tpcompiler.ir.constraints import Allowed, AnyStyle, Dims
from tpcompiler.ir.local import key
from tpcompiler.ir.names import layer_of, weight_of
from tpcompiler.ir.program import PlannedProgram, pin, tied
from tpcompiler.ir.sharding import Sharding
from tpcompiler.ir.static import computed_from_leaves
from tpcompiler.rules.features import feature_dims
from tpcompiler.solver.changes import UNIT, find_common, in_units, price_changes
from tpcompiler.solver.domain import Domain, find_domain, shardings_of_pin
from tpcompiler.solver.eliminate import check_size
from tpcompiler.solver.leaf import Leaf
from tpcompiler.solver.samples import Part, Samples, find_samples
from tpcompiler.solver.stage import Choice, Known, Stage
from tpcompiler.solver.tables import Tables
from tpcompiler.solver.together import combine_domains
from tpcompiler.solver.ways import Ways
from tpcompiler.terminal.progress import counted

MANY, FEW = 4, 3  # users, from which these are fewer, for tables over such values grow with every one of them
NEVER = numpy.inf
FEATURES = frozenset({"colwise", "rowwise", "replicate"})  # styles of a layer; of one weight of several, placements
FREE = aten.sym_size.int  # it takes a value as it is


class Values(NamedTuple):
    """The possible shardings of a value: one per value of a variable, or a single one."""

    variable: int | None
    shardings: tuple[Sharding, ...]


@dataclass(frozen=True)
class Layer:
    """A module with one weight, without a plan, or a weight among several.

    `styles`: what a plan says of it -> the dim of the weight that is cut, or none.
    """

    name: str
    variable: int
    styles: Mapping[str, int | None]


class Choices(NamedTuple):
    """The choices of an op with their prices, and the shardings that they need and produce, by operand and result."""

    each: Sequence[Choice]
    units: numpy.ndarray
    wants: Sequence[tuple[Sharding, ...]]
    made: Sequence[tuple[Sharding, ...]]

    @classmethod
    def of(cls, each: Sequence[Choice]) -> Choices:
        wants, made = (list(zip(*side, strict=True)) for side in ([c.wants for c in each], [c.made for c in each]))
        return cls(each, in_units([choice.seconds for choice in each]), wants, made)


class Gathers(NamedTuple):
    """The gathers of a leaf at rest: the number of times, and the axes."""

    axes: tuple[str, ...]
    times: int


@dataclass
class Problem:
    """The tables of programs, and what their variables are."""

    programs: Sequence[PlannedProgram]
    stage: Stage
    objective: Objective
    refused: float  # what it costs to gather a weight that the plan cuts
    samples: Samples
    tables: Tables = field(default_factory=Tables)
    domains: list[Domain] = field(default_factory=list)
    alone: list[list[Domain]] = field(default_factory=list)  # over each axis by itself: those of one axis
    layers: dict[str, Layer] = field(default_factory=dict)  # by weight
    owners: set[str] = field(default_factory=set)  # the modules of these
    groups: dict[fx.Node, str] = field(default_factory=dict)  # the leaf behind each placeholder
    leaves: dict[str, Values] = field(default_factory=dict)  # of those that have a say, by group
    values: dict[fx.Node, Values] = field(default_factory=dict)
    settled: dict[fx.Node, Values] = field(default_factory=dict)
    choices: dict[fx.Node, Choices] = field(default_factory=dict)
    variables: dict[fx.Node, int] = field(default_factory=dict)
    changes: list[tuple[fx.Node, Values, Values, bool, float]] = field(default_factory=list)
    known: Known = field(default_factory=Known)  # what layers alike share, and problems over this axis
    held: set[str] = field(default_factory=set)  # weights whose bytes have a price
    resting: dict[fx.Node, Gathers] = field(default_factory=dict)  # leaves that are gathered for their uses
    capped: int = 0

    def price(self, axes: Sequence[Values], units: numpy.ndarray) -> None:
        """Add a table (`in_units`), an axis for each of the values, those without a variable too."""
        kept = [values.variable for values in axes if values.variable is not None]
        if len(kept) < len(axes):
            fixed = tuple(values.variable is None for values in axes)
            known = "of", id(units), fixed  # kept next to the result, so that no other table gets its id
            _, units = self.known.once(known, lambda: (units, units[tuple(0 if one else slice(None) for one in fixed)]))
        self.tables.price(kept, units)

    def variable(self, shardings: tuple[Sharding, ...]) -> Values:
        return Values(self.tables.variable(len(shardings)) if len(shardings) > 1 else None, shardings)


def pose(
    programs: Sequence[PlannedProgram],
    stage: Stage,
    objective: Objective,
    before: Mapping[str, Sharding],
    refused: float = NEVER,
) -> Problem:
    """State the placements of programs that share their leaves, over the axis of a stage, as one problem.

    A variable for each op that may be cut: which of its rule's factors, or what passes through. One for each leaf that
    a style leaves open or that is written. One for each value with several users: what it is turned into for all of
    them. Without a plan one for each layer: `colwise`, `rowwise` or whole. Prices: changes of sharding, each op's
    roofline, and the bytes of weights that a rank holds. What the plan says of leaves and values holds, and no weight
    is gathered.

    Args:
        before: what each leaf is over the axes before, by group.
    """
    samples = stage.read.once(("samples", *programs), partial(find_samples, programs))
    problem = Problem(programs, stage, objective, refused, samples)
    problem.known = stage.known.once(("prices", objective[1:], refused), Known)  # `known` is of one machine
    problem.groups = _find_groups(programs)
    parts = stage.parts or (stage,)
    problem.alone = [
        _find_domains(problem, part, before)
        if part.before
        else part.read.once((*part.what, *programs), partial(_find_domains, problem, part, before))
        for part in parts
    ]
    problem.domains = combine_domains(stage, problem.alone) if stage.parts else problem.alone[0]
    for at, domain in enumerate(problem.domains):
        domain.weight = objective.weight(at)
        domain.kernels = find_program_kernels(domain.program.graph, objective, stage.read)
    if stage.rest == AnyStyle():
        _add_layers(problem)
    for domain in problem.domains:
        _state(problem, domain)
    if stage.parts:
        check_size(problem.tables, [(source.variable, to.variable) for _, source, to, *_ in problem.changes])
    for change in problem.changes:
        _price_changes(problem, *change)
    return problem


def find_program_kernels(graph: fx.Graph, objective: Objective, known: Known) -> dict[fx.Node, Kernel]:
    """Return each op's part in a kernel, as `find_kernels`, found once for each graph."""
    return known.once(("kernels", graph), partial(find_kernels, graph, objective.machine.fuses))


def _find_domains(problem: Problem, stage: Stage, before: Mapping[str, Sharding]) -> list[Domain]:
    leaves = _find_leaves(problem, stage, before)
    found: list[Domain] = []
    for _ in range(min(len(problem.programs), 2)):  # what one program makes of a leaf is a choice of the others
        found = [
            find_domain(program, stage, leaves[at], problem.samples) for at, program in enumerate(problem.programs)
        ]
    return found


def _find_groups(programs: Sequence[PlannedProgram]) -> dict[fx.Node, str]:
    """The leaf behind each placeholder; tied names and programs share them."""
    first: dict[str, str] = {}
    groups: dict[fx.Node, str] = {}
    for program in programs:
        names, first_of = {node.name: fqn for node, fqn in program.leaves()}, tied(program)
        for node, fqn in program.leaves():
            groups[node] = first.setdefault(fqn, first.get(names[first_of[node.name]], names[first_of[node.name]]))
    return groups


def _find_leaves(problem: Problem, stage: Stage, before: Mapping[str, Sharding]) -> list[dict[str, Leaf]]:
    """Placeholder name -> leaf, for each program."""
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
            asked = allowed.get(group, stage.rest)
            made[group] = Leaf(group, asked, group in leading, known, value, group in graded)
            made[group].start(stage)
    return [{node.name: made[problem.groups[node]] for node, _ in program.leaves()} for program in problem.programs]


def _add_layers(problem: Problem) -> None:
    """A layer for each module whose weight no plan names: the styles that its uses show.

    Where a module has several weights, or its weight several dims of features, the dims of each weight.
    """
    for domain in problem.domains:
        program, leaves = domain.program, dict(domain.program.leaves())
        static = computed_from_leaves(program.graph, leaves.keys())
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
                "colwise": feature_dims(nodes, "out", static, owner),
                "rowwise": feature_dims(nodes, "in", static, owner),
            }
            if any(sides.values()):
                styles = _styles_of(edit.fake(node), sides, problem.stage, owned[owner] == 1)
                name = owner if "replicate" in styles else weight_of(fqn)
                problem.owners.add(owner)
                problem.layers[fqn] = Layer(name, problem.tables.variable(len(styles)), styles)


def _has_style(leaf: Leaf) -> bool:
    """Return True if a style of its layer may place a leaf: no constraint does, and no value that is written to it."""
    return not leaf.shardings or (leaf.has_gradient and not leaf.is_fixed)


def _styles_of(value: Any, sides: Mapping[str, Set[int]], stage: Stage, is_alone: bool) -> dict[str, int | None]:
    degree = stage.mesh.degree(stage.axis)
    large = [dim for dim, size in enumerate(value.shape) if sym_hint(size) >= degree]
    if is_alone and all(len(dims) <= 1 for dims in sides.values()):
        return {**{style: dim for style, dims in sides.items() for dim in dims if dim in large}, "replicate": None}
    return {**{f"S({dim})": dim for dim in large}, "R": None}


def _state(problem: Problem, domain: Domain) -> None:
    """Add what a program chooses and pays."""
    program, stage = domain.program, problem.stage
    leaves = dict(program.leaves())
    static = computed_from_leaves(program.graph, leaves.keys())
    unmoved = _find_unmoved(domain, static)
    uses: dict[fx.Node, list[Values]] = {}
    problem.capped += sum(ways.is_capped for ways in domain.ways.values())
    for node in leaves:
        if (request := program.resting.get(node.name)) is not None:
            times = len({is_backward(user) for user in node.users})
            problem.resting[node] = Gathers(program.mesh.parts_of(request.axis), times)
        _add_leaf(problem, node, domain.leaves[node.name])
    for node in program.user_inputs():
        problem.values[node] = Values(None, (stage.within(program.constraints[node.name].sharding, edit.fake(node)),))
    for node in counted(list(edit.calls(program.graph)), "pricing choices", "ops"):
        if node.target in (FREE, operator.getitem):
            continue
        choices = problem.choices[node] = _choices(problem, domain, node)
        variable = None
        if len(choices.each) > 1:
            variable = problem.variables[node] = problem.tables.variable(len(choices.each))
        problem.price([Values(variable, ())], choices.units)
        for made, at in edit.results(node):
            problem.values[made] = Values(variable, choices.made[at])
        for index, operand in enumerate(domain.operands[node]):
            wanted = Values(variable, choices.wants[index])
            if operand in leaves and problem.groups[operand] not in problem.leaves:
                _price_use(problem, operand, leaves[operand], wanted, domain.leaves[operand.name])
            elif operand in problem.values:
                uses.setdefault(operand, []).append(wanted)
    names = {fqn: node for node, fqn in leaves.items()} | {node.name: node for node in program.user_inputs()}
    for value, name in program.followers():
        if value in problem.values:
            uses.setdefault(value, []).append(_at_rest(problem.values[names[name]], names[name], program, stage))
    for value, wanted_by in uses.items():
        _find_changes(problem, value, wanted_by, value in unmoved, domain.weight)


def _at_rest(leaf: Values, node: fx.Node, program: PlannedProgram, stage: Stage) -> Values:
    """Return the shardings of a gradient: those in which ranks hold its leaf."""
    request = program.resting.get(node.name)
    if request is None or request.axis not in stage.axes:
        return leaf
    return leaf._replace(shardings=tuple(program.at_rest(node, used) for used in leaf.shardings))


def _choices(problem: Problem, domain: Domain, node: fx.Node) -> Choices:
    operands = domain.operands[node]
    if node.target is pin:
        return Choices.of([Choice((each,), (each,), 0.0) for each in shardings_of_pin(domain, node)])
    if node not in domain.ways:
        whole = tuple(Sharding.replicated(edit.ndim(o)) for o in operands)
        return Choices.of([Choice(whole, tuple(Sharding.replicated(v.ndim) for v in edit.outputs(node)), 0.0)])
    ways = domain.ways[node]
    tensors = [*(edit.fake(o) for o in operands), *edit.outputs(node)]
    kernel = domain.kernels.get(node, NO_KERNEL)
    parts = problem.samples.parts_of(node, operands)
    known = "priced", ways, kernel, domain.weight, parts, problem.samples.axes
    price = partial(_priced, problem, node, ways, kernel, tensors, domain.weight, parts)
    return problem.known.once(known, lambda: Choices.of(price()))


def _priced(
    problem: Problem,
    node: fx.Node,
    ways: Ways,
    kernel: Kernel,
    tensors: Sequence[torch.Tensor],
    weight: float,
    parts: Sequence[Part],
) -> list[Choice]:
    mesh, found, objective = problem.stage.mesh, dict[Any, Choice](), problem.objective
    for option, wants, made in ways:
        values = list(zip(tensors, (*wants, *made), strict=True))
        seconds = objective.floor_seconds(kernel) + objective.tie_seconds(values, mesh)
        seconds += objective.work_seconds(kernel, local_work(node, ways.rule, option, mesh), values, mesh)
        seconds += problem.samples.seconds(parts, (*wants, *made))
        seconds = weight * seconds + UNIT * len(option.through)  # of equals, the one that reduces first
        found.setdefault((wants, made), Choice(wants, made, seconds, option, ways.rule))
    return list(found.values())


def _find_unmoved(domain: Domain, static: Set[fx.Node]) -> Set[fx.Node]:
    """Return the values that may not be gathered: all that is computed from leaves, or with a plan the leaves that it
    names, and values of their size that are computed from them, such as floats of a quantised weight.
    """
    if domain.stage.is_searched:
        return set() if domain.stage.gathers else static
    found = {node for node, _ in domain.program.leaves() if domain.leaves[node.name].is_fixed}
    for node, rule in domain.rules.items():
        weights = [operand for operand in domain.operands[node] if operand in found]
        is_whole = edit.is_tensor(node) and all(_numbers(node) >= _numbers(weight) for weight in weights)
        if weights and ((rule is not None and rule.relayout) or (node in static and is_whole)):
            found.add(node)
    return found


def _numbers(value: fx.Node) -> int:
    return sym_hint(edit.fake(value).numel())


def _add_leaf(problem: Problem, node: fx.Node, leaf: Leaf) -> None:
    if leaf.group not in problem.leaves and leaf.shardings:
        values = problem.leaves[leaf.group] = problem.variable(tuple(leaf.shardings))
        problem.price([values], _held_units(problem, node, values.shardings))
        if leaf.within is not None:
            allowed = [leaf.may_be(sharding, problem.stage) for sharding in values.shardings]
            problem.price([values], numpy.where(allowed, 0.0, NEVER))
        if (layer := problem.layers.get(leaf.group)) is not None:
            cuts = [own.only(problem.stage.axis) for own in values.shardings]
            fits = [[_is_cut(cut, dim) for cut in cuts] for dim in layer.styles.values()]
            problem.price([Values(layer.variable, ()), values], numpy.where(fits, 0.0, NEVER))
    if leaf.group in problem.leaves:
        problem.values[node] = problem.leaves[leaf.group]


def _held_units(problem: Problem, node: fx.Node, shardings: Sequence[Sharding]) -> numpy.ndarray:
    """Return the price of a leaf in each of these shardings: of its bytes, and at rest of gathering it for its uses."""
    value, mesh, objective = edit.fake(node), problem.stage.mesh, problem.objective
    gathers = problem.resting.get(node)

    def price(count: int) -> float:
        if gathers is None:
            return objective.held_seconds(count)
        held = count / mesh.size(gathers.axes)
        sent = objective.machine.collective_seconds("all_gather", gathers.axes, count - held, mesh)
        return objective.held_seconds(held) + gathers.times * sent / objective.spread

    known = "held", key(node), shardings, gathers
    return problem.known.once(known, lambda: in_units([price(local_bytes(value, each, mesh)) for each in shardings]))


def _price_use(problem: Problem, leaf: fx.Node, fqn: str, wanted: Values, placed: Leaf) -> None:
    """A leaf without a say is what its use wants, if its layer's style says so too. It is held once.

    A style that is kept to is one of the layer's weight, which its other leaves follow.
    """
    group, stage = problem.groups[leaf], problem.stage
    layer = problem.layers.get(group)
    is_held = group in problem.held
    problem.held.add(group)
    is_fixed = stage.is_searched and layer is None and weight_of(fqn) == fqn and not edit.fake(leaf).is_floating_point()
    styles = None if layer is None else tuple(layer.styles.values())
    follows = isinstance(placed.within, Dims) and layer is None and layer_of(fqn) in problem.owners
    allowed = tuple(follows or placed.may_be(want, stage) for want in wanted.shardings)

    def find() -> numpy.ndarray:
        units = _held_units(problem, leaf, wanted.shardings) * (0 if is_held else 1)
        units = numpy.where(allowed, units, NEVER)
        if is_fixed:
            units = numpy.where([want.is_replicated for want in wanted.shardings], 0.0, NEVER)
        if styles is None:
            return units
        fits = [[_is_cut(want.only(stage.axis), dim) for want in wanted.shardings] for dim in styles]
        return numpy.where(fits, units, NEVER)

    gathers = problem.resting.get(leaf)
    known = "use", key(leaf), wanted.shardings, is_held, is_fixed, styles, allowed, gathers
    problem.price([wanted] if layer is None else [Values(layer.variable, ()), wanted], problem.known.once(known, find))


def _is_cut(sharding: Sharding, dim: int | None) -> bool:
    """True if a sharding shards this dim only, or no dim."""
    dims = [] if dim is None else [dim]
    return [at for at, how in enumerate(sharding.dims) if how.axes] == dims and not sharding.partial


def _find_changes(problem: Problem, value: fx.Node, uses: Sequence[Values], is_weight: bool, weight: float) -> None:
    """Its changes into what its users want; for several users once into what suits them best, and for each the rest."""
    made = problem.values[value]
    if len(uses) > 1 and not is_weight:
        wanted = tuple(use.shardings for use in uses)
        many = FEW ** len(problem.stage.own) if len(uses) >= MANY else math.inf
        find = partial(find_common, made.shardings, wanted, int(min(many, problem.stage.most)))
        domain, more = problem.known.once(("settled", made.shardings, wanted), find)
        problem.capped += more
        settled = problem.settled[value] = problem.variable(domain)
        problem.changes.append((value, made, settled, is_weight, weight))
        made = settled
    problem.changes += [(value, made, use, is_weight, weight) for use in uses]


def _price_changes(
    problem: Problem, value: fx.Node, source: Values, target: Values, is_weight: bool, weight: float
) -> None:
    tensor, have, want = edit.fake(value), source.shardings, target.shardings
    refused = problem.refused / weight if is_weight else None

    def find() -> numpy.ndarray:
        prices = price_changes(have, want, tensor, problem.stage.mesh, problem.objective, problem.stage.read, refused)
        return in_units(weight * prices)

    known = have, want, key(value), is_weight, weight
    problem.price([source, target], problem.known.once(known, find))
