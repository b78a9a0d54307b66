"""State the placements of programs as a problem: what every op may do, and what all of it costs."""

from __future__ import annotations

import itertools
import math
import operator
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from functools import partial
from typing import Any

import numpy
import torch
from torch import fx

from tpcompiler._torch import aten, sym_hint
from tpcompiler.cost.fusion import NO_KERNEL, Kernel, find_kernels
from tpcompiler.cost.objective import Objective, local_work
from tpcompiler.cost.path import reshard_wire_bytes
from tpcompiler.errors import UnsupportedError
from tpcompiler.ir import edit
from tpcompiler.ir.backward import is_backward
from tpcompiler.ir.constraints import AnyStyle
from tpcompiler.ir.dim_sharding import DimSharding, Size, divides
from tpcompiler.ir.local import key
from tpcompiler.ir.memo import Memo
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.program import PlannedProgram, pin
from tpcompiler.ir.sharding import Sharding
from tpcompiler.solver.batch_dims import Part, find_samples
from tpcompiler.solver.domain import Domain, combine_domains, find_domain, shardings_of_pin
from tpcompiler.solver.leaves import Leaf, add_layers, add_leaf, find_groups, find_leaves, price_use
from tpcompiler.solver.minimize import MOST_JOINT_CELLS, TOO_SLOW, find_order
from tpcompiler.solver.problem import NEVER, UNIT, Choices, Gathers, Problem, Values, in_units
from tpcompiler.solver.strategies import Strategies
from tpcompiler.solver.turn import Strategy, Turn
from tpcompiler.terminal.progress import counted

MANY, FEW = 4, 3  # users, from which these are fewer, for tables over such values grow with every one of them
MOST_ROUNDS = 8  # over programs that share leaves, until none has a new choice
MOST_CHANGES = 20_000  # of one sharding into another, over all axes at once: each takes up to milliseconds to price
FREE = aten.sym_size.int  # it takes a value as it is


def build_problem(
    programs: Sequence[PlannedProgram],
    turn: Turn,
    objective: Objective,
    before: Mapping[str, Sharding],
    refused: float = NEVER,
) -> Problem:
    """State the placements of programs that share their leaves, over the axis of a turn, as one problem.

    A variable for each op that may be cut: which of its rule's factors, or what passes through. One for each leaf that
    a style leaves open or that is written. One for each value with several users: what it is turned into for all of
    them. Without a plan one for each layer: `colwise`, `rowwise` or whole. Prices: changes of sharding, each op's
    roofline, and the bytes of weights that a rank holds. What the plan says of leaves and values holds, and no weight
    is gathered.

    Args:
        before: what each leaf is over the axes before, by group.
    """
    samples = turn.read.once(("samples", *programs), partial(find_samples, programs))
    problem = Problem(programs, turn, objective, refused, samples)
    problem.storage.sizes = problem.tables.sizes
    problem.known = turn.known.once(("prices", objective[2:], refused), Memo)  # `known` is of one machine
    problem.groups = find_groups(programs)
    parts = turn.parts or (turn,)
    problem.alone = [
        _find_domains(problem, part, before)
        if part.before
        else part.read.once((*part.what, *programs), partial(_find_domains, problem, part, before))
        for part in parts
    ]
    problem.domains = combine_domains(turn, problem.alone) if turn.parts else problem.alone[0]
    for at, domain in enumerate(problem.domains):
        domain.weight = objective.weight(at)
        domain.kernels = find_program_kernels(domain.program.graph, objective, turn.read)
    if turn.rest == AnyStyle():
        add_layers(problem)
    for domain in problem.domains:
        _state(problem, domain)
    scopes = [over for over, _ in (*problem.tables.factors, *problem.storage.factors)]
    scopes += [
        tuple({v.variable for v in (source, to) if v.variable is not None}) for _, source, to, *_ in problem.changes
    ]
    try:
        problem.tables.order = find_order(problem.tables.sizes, scopes, MOST_JOINT_CELLS if turn.parts else TOO_SLOW)
    except UnsupportedError:  # over one axis there are other ways to solve it
        if turn.parts:
            raise
    if turn.parts:
        _check_changes(problem)
    for change in counted(problem.changes, "pricing changes", "values"):
        _add_prices(problem, *change)
    return problem


def _check_changes(problem: Problem) -> None:
    """Refuse a problem over several axes of which the prices would take minutes to find.

    Raises:
        UnsupportedError: more than `MOST_CHANGES` different changes of sharding.
    """
    alike = {(source.shardings, target.shardings, key(value)) for value, source, target, *_ in problem.changes}
    changes = {(*change, own) for have, want, own in alike for change in itertools.product(have, want)}
    changes = {change for change in changes if change[0] != change[1]}
    if len(changes) > MOST_CHANGES:
        raise UnsupportedError(f"values may change their shardings in {len(changes):,} ways", help="give a plan")


def find_program_kernels(graph: fx.Graph, objective: Objective, known: Memo) -> dict[fx.Node, Kernel]:
    """Return each op's part in a kernel, as `find_kernels`, found once for each graph."""
    return known.once(("kernels", graph), partial(find_kernels, graph, objective.machine.fuses))


def _find_domains(problem: Problem, turn: Turn, before: Mapping[str, Sharding]) -> list[Domain]:
    leaves = find_leaves(problem, turn, before)
    found: list[Domain] = []
    for _ in range(MOST_ROUNDS if len(problem.programs) > 1 else 1):
        known = _sizes_of(leaves)
        found = [find_domain(program, turn, leaves[at], problem.samples) for at, program in enumerate(problem.programs)]
        growing = sum(map(operator.ne, known, _sizes_of(leaves)))
        if not growing:  # what one program makes of a leaf is a choice of the others
            break
        found[0].growing += growing if len(problem.programs) > 1 else 0
    return found


def _sizes_of(leaves: Sequence[Mapping[str, Leaf]]) -> list[int]:
    return [len(leaf.shardings) for leaf in {id(leaf): leaf for own in leaves for leaf in own.values()}.values()]


def _state(problem: Problem, domain: Domain) -> None:
    """Add what a program chooses and pays."""
    program, turn = domain.program, problem.turn
    leaves = dict(program.leaves())
    unmoved = _find_unmoved(domain)
    uses: dict[fx.Node, list[Values]] = {}
    capped = {call for call, strategies in domain.strategies.items() if strategies.is_capped}
    problem.capped += len(capped | domain.stale) + domain.growing
    for node in leaves:
        if (request := program.resting.get(node.name)) is not None:
            times = len({is_backward(user) for user in node.users})
            problem.resting[node] = Gathers(program.mesh.parts_of(request.axis), times)
        add_leaf(problem, node, domain.leaves[node.name])
    for node in program.user_inputs():
        problem.values[node] = Values(None, (turn.within(program.constraints[node.name].sharding, edit.fake(node)),))
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
                price_use(problem, operand, leaves[operand], wanted, domain.leaves[operand.name])
            elif operand in problem.values:
                uses.setdefault(operand, []).append(wanted)
    names = {fqn: node for node, fqn in leaves.items()} | {node.name: node for node in program.user_inputs()}
    for value, name in program.followers():
        if value in problem.values:
            uses.setdefault(value, []).append(_at_rest(problem.values[names[name]], names[name], program, turn))
    for value, wanted_by in uses.items():
        _find_changes(problem, value, wanted_by, value in unmoved, domain.weight)


def _at_rest(leaf: Values, node: fx.Node, program: PlannedProgram, turn: Turn) -> Values:
    """Return the shardings of a gradient: those in which ranks hold its leaf."""
    request = program.resting.get(node.name)
    if request is None or request.axis not in turn.axes:
        return leaf
    return leaf._replace(shardings=tuple(program.at_rest(node, used) for used in leaf.shardings))


def _choices(problem: Problem, domain: Domain, node: fx.Node) -> Choices:
    operands = domain.operands[node]
    if node.target is pin:
        return Choices.of([Strategy((each,), (each,), 0.0) for each in shardings_of_pin(domain, node)])
    if node not in domain.strategies:
        whole = tuple(Sharding.replicated(edit.ndim(o)) for o in operands)
        return Choices.of([Strategy(whole, tuple(Sharding.replicated(v.ndim) for v in edit.outputs(node)), 0.0)])
    strategies = domain.strategies[node]
    tensors = [*(edit.fake(o) for o in operands), *edit.outputs(node)]
    kernel = domain.kernels.get(node, NO_KERNEL)
    parts = problem.samples.parts_of(node, operands)
    known = "priced", strategies, kernel, domain.weight, parts, problem.samples.axes
    price = partial(_priced, problem, node, strategies, kernel, tensors, domain.weight, parts)
    return problem.known.once(known, lambda: Choices.of(price()))


def _priced(
    problem: Problem,
    node: fx.Node,
    strategies: Strategies,
    kernel: Kernel,
    tensors: Sequence[torch.Tensor],
    weight: float,
    parts: Sequence[Part],
) -> list[Strategy]:
    mesh, found, objective = problem.turn.mesh, dict[Any, Strategy](), problem.objective
    for wants, made, _, option, _ in strategies:
        values = list(zip(tensors, (*wants, *made), strict=True))
        seconds = objective.floor_seconds(kernel) + objective.tie_seconds(values, mesh)
        seconds += objective.work_seconds(kernel, local_work(node, strategies.rule, option, mesh), values, mesh)
        seconds += problem.samples.seconds(parts, (*wants, *made))
        seconds = weight * seconds + UNIT * len(option.through)  # of equals, the one that reduces first
        found.setdefault((wants, made), Strategy(wants, made, seconds, option, strategies.rule))
    return list(found.values())


def _find_unmoved(domain: Domain) -> Set[fx.Node]:
    """Return the values that may not be gathered: all that is computed from leaves, or with a plan the leaves that it
    names, and values of their size that are computed from them, such as floats of a quantised weight.
    """
    if domain.turn.is_searched:
        return set() if domain.turn.gathers else domain.static
    static = domain.static
    found = {node for node, _ in domain.program.leaves() if domain.leaves[node.name].is_fixed}
    for node, rule in domain.rules.items():
        weights = [operand for operand in domain.operands[node] if operand in found]
        is_whole = edit.is_tensor(node) and all(_numbers(node) >= _numbers(weight) for weight in weights)
        if weights and ((rule is not None and rule.relayout) or (node in static and is_whole)):
            found.add(node)
    return found


def _numbers(value: fx.Node) -> int:
    return sym_hint(edit.fake(value).numel())


def _find_changes(problem: Problem, value: fx.Node, uses: Sequence[Values], is_weight: bool, weight: float) -> None:
    """Its changes into what its users want; for several users once into what suits them best, and for each the rest."""
    made = problem.values[value]
    if len(uses) > 1 and not is_weight:
        wanted = tuple(use.shardings for use in uses)
        many = FEW ** len(problem.turn.own) if len(uses) >= MANY else math.inf
        find = partial(_find_common, made.shardings, wanted, int(min(many, problem.turn.most)))
        domain, more = problem.known.once(("settled", made.shardings, wanted), find)
        problem.capped += more
        settled = problem.settled[value] = problem.variable(domain)
        problem.changes.append((value, made, settled, is_weight, weight))
        made = settled
    problem.changes += [(value, made, use, is_weight, weight) for use in uses]


def _add_prices(
    problem: Problem, value: fx.Node, source: Values, target: Values, is_weight: bool, weight: float
) -> None:
    """Add the table of prices of a change of a value, from one of its variables to another."""
    tensor, have, want = edit.fake(value), source.shardings, target.shardings
    refused = problem.refused / weight if is_weight else None

    def find() -> numpy.ndarray:
        prices = price_changes(have, want, tensor, problem.turn.mesh, problem.objective, problem.turn.read, refused)
        return in_units(weight * prices)

    known = have, want, key(value), is_weight, weight
    problem.price([source, target], problem.known.once(known, find))


def price_changes(
    have: Sequence[Sharding],
    want: Sequence[Sharding],
    tensor: torch.Tensor,
    mesh: Mesh,
    objective: Objective,
    known: Memo,
    refused: float | None = None,
) -> numpy.ndarray:
    """Return the seconds of every change of a value from one of `have` (a row) to one of `want`.

    Args:
        refused: of a weight, the price of a change that sends anything.
        known: what was found before, on any mesh.
    """

    def price(source: Sharding, target: Sharding) -> float:
        if refused is not None and reshard_wire_bytes(source, target, tensor.shape, tensor.itemsize, mesh):
            return refused
        return objective.change_seconds(source, target, tensor, mesh)

    def look_up(source: Sharding, target: Sharding) -> float:
        if source == target:
            return 0.0
        alike = _alike(source, target, tensor, mesh), mesh, refused
        return known.once(alike, partial(price, source, target))

    rows, columns = dict.fromkeys(have), dict.fromkeys(want)
    cells = [[look_up(source, target) for target in columns] for source in rows]
    at, to = ({sharding: i for i, sharding in enumerate(each)} for each in (rows, columns))
    return numpy.asarray(cells)[numpy.ix_([at[own] for own in have], [to[own] for own in want])]


def _alike(source: Sharding, target: Sharding, tensor: torch.Tensor, mesh: Mesh) -> tuple[Any, ...]:
    """Return a key of changes with equal collectives: of as many bytes, between cuts of dims that are alike.

    The size of a dim counts only where not all axes of the change divide it, or where it is cut in blocks or parts;
    its place, where that is the first: its shares need no copy.
    """
    ranks, is_unequal = mesh.size(mesh.ordered(source.axes | target.axes)), mesh.is_unequal(source.axes | target.axes)

    def is_even(have: DimSharding, want: DimSharding, size: Size) -> bool:
        return _is_plain(have) and _is_plain(want) and divides(size, ranks) and not is_unequal

    dims = tuple(
        (at > 0, have, want, 0 if is_even(have, want, size) else sym_hint(size), type(size))
        for at, (have, want, size) in enumerate(zip(source.dims, target.dims, tensor.shape, strict=True))
        if have.axes or want.axes
    )
    return dims, source.partial, target.partial, sym_hint(tensor.numel()), tensor.element_size()


def _is_plain(cut: DimSharding) -> bool:
    return not cut.parts and all(not level.block and level.unit == 1 for level in cut.levels)


def _find_common(
    made: Sequence[Sharding], uses: Sequence[Sequence[Sharding]], most: int
) -> tuple[tuple[Sharding, ...], bool]:
    """Return the shardings to which a value may change once for all users, and True if some were left out."""
    wanted = Counter(sharding.without_spans for use in uses for sharding in use)
    first = [sharding for sharding in made if sharding in wanted and sharding.is_replicated]
    domain = tuple(dict.fromkeys([*first, *(sharding for sharding, _ in wanted.most_common())]))
    return domain[:most], len(domain) > most
