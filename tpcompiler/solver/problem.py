"""The placements of a program as a problem: what every op may do, what each weight may be, and what all of it costs."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy
from torch import fx

from tpcompiler._torch import aten, sym_hint
from tpcompiler.cost.objective import Machine, change_seconds, held_seconds, local_bytes
from tpcompiler.ir import edit
from tpcompiler.ir.local import key
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.program import PlannedProgram, Seed, tied
from tpcompiler.ir.sharding import Sharding
from tpcompiler.rules.features import computed_from_leaves, feature_dims
from tpcompiler.solver.domain import Choice, find_choices, tensor_index
from tpcompiler.solver.eliminate import Tables

Style = Literal["colwise", "rowwise"]
MOST_SETTLED = 8  # shardings that a value with several users may be turned into for all of them
MANY, FEW = 4, 3  # users, from which these are fewer, for tables over such values grow with every one of them
NEVER = numpy.inf


class Values(NamedTuple):
    """What a value may be: one sharding for each value of a variable, or one sharding."""

    variable: int | None
    shardings: Sequence[Sharding]


@dataclass(frozen=True)
class Layer:
    """A module with weights of its own. `cuts`: style -> leaf -> the dim that it cuts."""

    name: str
    variable: int
    styles: Sequence[Style | None]
    cuts: Mapping[Style, Mapping[str, int]]


@dataclass
class Problem:
    """The tables of a program, and what their variables are."""

    program: PlannedProgram
    mesh: Mesh
    machine: Machine
    tables: Tables = field(default_factory=Tables)
    layers: dict[str, Layer] = field(default_factory=dict)
    values: dict[fx.Node, Values] = field(default_factory=dict)
    settled: dict[fx.Node, Values] = field(default_factory=dict)
    choices: dict[fx.Node, list[Choice]] = field(default_factory=dict)
    variables: dict[fx.Node, int] = field(default_factory=dict)
    changes: dict[Any, numpy.ndarray] = field(default_factory=dict)  # tables of changes, which layers alike share
    held: set[str] = field(default_factory=set)  # layers whose weights have a price
    capped: int = 0


def pose(program: PlannedProgram, mesh: Mesh, machine: Machine) -> Problem:
    """State the choice of a style for every layer as a problem, over a mesh of one axis.

    A variable for each op that may be cut: which of its rule's factors, or what passes through. One for each layer:
    `colwise`, `rowwise` or whole. One for each value with several users: what it is turned into for all of them.
    Prices: changes of sharding, each op's roofline, and the bytes of weights that a rank holds. Weights are not
    gathered, no dim of the inputs' tokens or samples is cut, and what the plan says of leaves and values holds.
    """
    problem = Problem(program, mesh, machine)
    leaves = dict(program.leaves())
    static = computed_from_leaves(program.graph, leaves.keys())
    _add_layers(problem, leaves, static)
    of = _layer_of(problem, leaves)
    uses: dict[fx.Node, list[Values]] = {}
    problem.choices = find_choices(program, mesh, machine)
    for node in program.user_inputs():
        problem.values[node] = Values(None, [program.input_shardings[node.name].only(*mesh.names)])
    for node, choices in problem.choices.items():
        variable = None
        if len(choices) > 1:
            variable = problem.variables[node] = problem.tables.variable(len(choices))
            problem.tables.price([variable], numpy.array([choice.seconds for choice in choices]))
        problem.values[node] = Values(variable, [choice.made[0] for choice in choices] if choices[0].made else [])
        for user in node.users if isinstance(node.meta.get("val"), (tuple, list)) else ():
            if user.target is operator.getitem and edit.is_tensor(user):
                at = tensor_index(node, user.args[1])
                problem.values[user] = Values(variable, [choice.made[at] for choice in choices])
        for index, operand in enumerate(edit.operands(node) if node.target not in FREE else ()):
            wanted = Values(variable, [choice.wants[index] for choice in choices])
            if operand.name in program.seeds:
                _price_seed(problem, program.seeds[operand.name], wanted)
            elif operand in leaves and not operand.meta["val"].is_floating_point():
                _price_seed(problem, Seed(Sharding.replicated(operand.meta["val"].ndim), ""), wanted)
            elif operand in leaves:
                _price_leaf(problem, operand, of.get(leaves[operand]), wanted)
            elif operand.op != "placeholder" or operand in problem.values:
                uses.setdefault(operand, []).append(wanted)
    for value, wanted_by in uses.items():
        _price_value(problem, value, wanted_by, value in static)
    return problem


FREE = (aten.sym_size.int, aten.sym_numel.default, operator.getitem)


def _add_layers(problem: Problem, leaves: Mapping[fx.Node, str], static: Set[fx.Node]) -> None:
    program, first_of = problem.program, tied(problem.program)
    groups: dict[str, list[fx.Node]] = {}
    for node in leaves:
        groups.setdefault(first_of[node.name], []).append(node)
    degree = problem.mesh.world_size
    for node, fqn in leaves.items():
        value, owner = node.meta["val"], fqn.rpartition(".")[0]
        is_first = first_of[node.name] == node.name
        if node.name in program.seeds or not (is_first and owner and value.ndim > 1 and value.is_floating_point()):
            continue
        found: dict[Style, dict[str, int]] = {}
        sides: tuple[tuple[Style, Literal["out", "in"]], ...] = (("colwise", "out"), ("rowwise", "in"))
        for style, side in sides:
            dims = feature_dims(groups[first_of[node.name]], side, static, owner)
            if len(dims) == 1 and sym_hint(value.shape[at := dims.pop()]) >= degree:
                found[style] = {fqn: at}
        if owner in problem.layers or not found:
            continue
        styles: list[Style | None] = [*found, None]
        variable = problem.tables.variable(len(styles))
        problem.layers[owner] = Layer(owner, variable, styles, found)


def _layer_of(problem: Problem, leaves: Mapping[fx.Node, str]) -> dict[str, Layer]:
    """The layer that decides on each leaf, tied ones with their first."""
    first_of, names = tied(problem.program), {node.name: fqn for node, fqn in leaves.items()}
    owns = {fqn: layer for layer in problem.layers.values() for cut in layer.cuts.values() for fqn in cut}
    firsts = {fqn: names[first_of[node.name]] for node, fqn in leaves.items()}
    return {fqn: owns[first] for fqn, first in firsts.items() if first in owns}


def _price_seed(problem: Problem, seed: Seed, wanted: Values) -> None:
    """A planned leaf is as the plan says; where in its dim a style's cut lies is for the use to say."""
    given = seed.sharding.only(*problem.mesh.names)
    fits = [_cut_dims(want) == _cut_dims(given) if seed.loose else want == given for want in wanted.shardings]
    variable = problem.tables.variable(1) if wanted.variable is None else wanted.variable
    problem.tables.price([variable], numpy.where(fits, 0.0, NEVER))


def _price_leaf(problem: Problem, leaf: fx.Node, layer: Layer | None, wanted: Values) -> None:
    """A leaf is what its layer's style says; one without a layer is what its use wants. It is held once."""
    if layer is None:
        return
    value, is_held = leaf.meta["val"], layer.name in problem.held
    problem.held.add(layer.name)
    table = numpy.zeros((len(layer.styles), len(wanted.shardings)))
    for row, style in enumerate(layer.styles):
        dims = [] if style is None else list(layer.cuts[style].values())
        for column, want in enumerate(wanted.shardings):
            if _cut_dims(want) != dims:
                table[row, column] = NEVER
            elif not is_held:
                table[row, column] = held_seconds(local_bytes(value, want, problem.mesh), problem.machine)
    if wanted.variable is None:
        problem.tables.price([layer.variable], table[:, 0])
    else:
        problem.tables.price([layer.variable, wanted.variable], table)


def _cut_dims(sharding: Sharding) -> list[int]:
    """The dims that are cut; -1 besides for a pending reduction, which no layer's weight is."""
    return [at for at, how in enumerate(sharding.dims) if how.axes] + [-1] * bool(sharding.partial)


def _price_value(problem: Problem, value: fx.Node, uses: Sequence[Values], is_static: bool) -> None:
    """What its users want, made of what it is; for several users, once what suits them best, and for each the rest."""
    made = problem.values[value]
    if len(uses) > 1:
        wanted = Counter(sharding for use in uses for sharding in use.shardings)
        first = [sharding for sharding in made.shardings if sharding in wanted and sharding.is_replicated]
        domain = list(dict.fromkeys([*first, *(sharding for sharding, _ in wanted.most_common())]))
        most = FEW if len(uses) >= MANY else MOST_SETTLED
        problem.capped += len(domain) > most
        domain = domain[:most]
        settled = problem.settled[value] = Values(problem.tables.variable(len(domain)), domain)
        _price_change(problem, value, made, settled, is_static)
        made = settled
    for use in uses:
        _price_change(problem, value, made, use, is_static)


def _price_change(problem: Problem, value: fx.Node, source: Values, target: Values, is_static: bool) -> None:
    tensor = value.meta["val"]
    known = tuple(source.shardings), tuple(target.shardings), key(tensor.shape), tensor.itemsize, is_static
    if known not in problem.changes:
        seconds = [
            [
                NEVER
                if is_static and have.cut_axes and have != want
                else change_seconds(have, want, tensor, problem.mesh, problem.machine)
                for want in target.shardings
            ]
            for have in source.shardings
        ]
        problem.changes[known] = numpy.array(seconds)
    table = problem.changes[known]
    axes = [variable for variable in (source.variable, target.variable) if variable is not None]
    if source.variable is None:
        table = table[0]
    if target.variable is None:
        table = table[..., 0]
    if not axes:
        axes, table = [problem.tables.variable(1)], table.reshape(1)
    problem.tables.price(axes, table)
