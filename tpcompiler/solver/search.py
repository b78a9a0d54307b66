"""One search for the cheapest placements of all values: axis by axis, or over several axes at once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace

import numpy
from torch import fx

from tpcompiler.errors import UnsupportedError
from tpcompiler.ir import edit
from tpcompiler.ir.constraints import AsUsed
from tpcompiler.ir.dim_sharding import DimSharding
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.sharding import Sharding
from tpcompiler.solver.changes import UNIT
from tpcompiler.solver.domain import Domain, find_shared_heads, find_tokens
from tpcompiler.solver.eliminate import TOO_SLOW, eliminate, solve
from tpcompiler.solver.pose import pose
from tpcompiler.solver.problem import FEATURES, NEVER, Problem, Values
from tpcompiler.solver.samples import find_sample_axes
from tpcompiler.solver.solution import Layered, Place, Solution, join_places
from tpcompiler.solver.stage import MOST_CHOICES, Choice, Known, Stage
from tpcompiler.solver.task import Task
from tpcompiler.solver.variants import find_openings, find_places

FEWER = (MOST_CHOICES, 8, 4, 2, 1)  # choices of an op, as long as the tables are too large
REFUSED = 0.05  # seconds for a weight that would be gathered, where nothing else can be: more than all else


def find_bound(task: Task, axes: Sequence[str]) -> float:
    """Return seconds that no placement over these axes takes less than.

    Each axis by itself, with all that there is cut evenly over the other axes for nothing. What a placement over all
    axes does over that one is a placement of this problem, which costs no more there: a rank has no less than its even
    share to work at, to hold and to send.
    """
    least, mesh = 0.0, task.programs[0].mesh
    for axis in axes:
        relaxed = task.objective._replace(spread=mesh.size([other for other in axes if other != axis]))
        for most in FEWER:
            with suppress(UnsupportedError):
                problem = pose(task.programs, _stage_of(task, (axis,), {}, most), relaxed, {})
                task.tally.prices += problem.tables.count_cells()
                least = max(least, (_solved(problem) or (0.0,))[0])
                break
    return least


def _stage_of(task: Task, axes: tuple[str, ...], before: Mapping[fx.Node, Choice], most: int) -> Stage:
    mesh, rest = task.programs[0].mesh, task.programs[0].rest if axes[-1] in task.model_axes else AsUsed()
    known = task.known.once(("over", mesh, axes, rest, most), Known)
    return Stage(mesh, axes, before, rest, task.known, most, known=known)


def search(task: Task) -> Solution:
    """Find the cheapest placements of all values, in turns over the axes of the mesh, each turn exactly.

    Raises:
        UnsupportedError: as `eliminate.solve`; axes that are solved at once have too many choices together.
    """
    task.tally.searches += 1
    return _search_in_turns(task)


def _search_in_turns(task: Task) -> Solution:
    programs, objective, held, model = task.programs, task.objective, task.held, task.model_axes
    mesh, heads = programs[0].mesh, list[tuple[str, int, bool]]()
    found = Solution(programs, objective.machine, model=model, optimizer=objective.optimizer)
    groups, solved = dict[str, Sharding](), list[tuple[str, ...]]()
    samples = [axis for axis in mesh.names if axis in find_sample_axes(programs)]  # a small batch has one dim for them
    rest = [axis for axis in mesh.names if axis not in (*samples, *model)]
    order = [*samples, *model, *rest]  # what the first cut, others reduce less of
    turns = task.turns or _in_turns(mesh, order)
    for at, turn in enumerate(turns):
        before = tuple(axis for each in turns[:at] for axis in each)
        for most in FEWER:
            parts = [_stage_of(task, (*before, axis), found.choices, most) for axis in turn]
            stage = parts[0] if len(parts) == 1 else Stage.together(parts)
            problem = pose(programs, stage, objective, groups)
            for variable, allowed in held(problem) if held else ():
                problem.tables.price([variable], numpy.where(allowed, 0.0, NEVER))
            task.tally.prices += problem.tables.count_cells()
            try:
                values = _solved(problem)
                break
            except UnsupportedError:
                if stage.parts or held or most == FEWER[-1]:
                    raise
        if values is None and samples and at and not task.turns:  # how samples are cut leaves no way to cut layers
            return _search_in_turns(replace(task, turns=_in_turns(mesh, [*model, *rest, *samples])))
        if values is None and not stage.is_searched and held is None:
            problem = pose(programs, stage, objective, groups, REFUSED)
            values = _solved(problem)
        if values is None:
            return Solution(programs, objective.machine, seconds=math.inf)
        found, groups = _read(problem, found, *values)
        solved += [turn] if problem.tables.sizes else []
        heads += [
            (part.axis, *shared)
            for part, domains in zip(stage.parts or (stage,), problem.alone, strict=True)
            for domain in domains
            for shared in sorted(find_shared_heads(domain))
        ]
    bound = found.seconds if len(solved) <= 1 else 0.0  # axes in turns: the first need not leave the others their best
    return replace(found, turns=tuple(solved), bound=bound, heads=tuple(dict.fromkeys(heads)))


def _in_turns(mesh: Mesh, order: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    return tuple((axis,) for axis in order if mesh.degree(axis) > 1) or ((order[-1],),)


def _solved(problem: Problem) -> tuple[float, list[int]] | None:
    cost, values = eliminate(problem.tables, TOO_SLOW) if problem.stage.parts else solve(problem.tables)
    return None if math.isinf(cost) else (cost * UNIT, values)


def _read(
    problem: Problem, before: Solution, seconds: float, found: Sequence[int]
) -> tuple[Solution, dict[str, Sharding]]:
    choices = {
        node: own.each[found[problem.variables[node]] if node in problem.variables else 0]
        for node, own in problem.choices.items()
    }
    groups = {group: _chosen(values, found) for group, values in problem.leaves.items()}
    wishes: dict[str, set[Sharding]] = {}
    for domain in problem.domains:
        for operand, want in _wanted(domain, choices):
            if operand in problem.groups and problem.groups[operand] not in groups:
                wishes.setdefault(problem.groups[operand], set()).add(want)
    for node, group in problem.groups.items():  # cutting a leaf where it is used is a local slice
        own = wishes.get(group, ())
        groups.setdefault(group, next(iter(own)) if len(own) == 1 else Sharding.replicated(edit.ndim(node)))
    leaves = {node: groups[group] for node, group in problem.groups.items()}
    for program in problem.programs:
        leaves |= {node: program.constraints[node.name].sharding for node in program.user_inputs()}
    solution = Solution(
        problem.programs,
        before.machine,
        choices,
        leaves,
        {node: _chosen(values, found) for node, values in problem.settled.items()},
        _layers(problem, before, groups, found),
        seconds,
        before.capped + problem.capped,
        join_places([*before.openings.items(), *_openings(problem, choices, found)]),
        model=before.model,
        optimizer=before.optimizer,
        batch=(*before.batch, *_axes_of_batch(problem, choices)),
    )
    return solution, groups


def _axes_of_batch(problem: Problem, choices: Mapping[fx.Node, Choice]) -> Iterator[str]:
    """Yield the axes of a search that may cut the batch over which it does."""
    cut = {
        axis
        for domain in (problem.domains if problem.stage.gathers else ())
        for node, tokens in find_tokens(domain).items()
        if node in choices
        for factor, by in choices[node].option.cuts.items()
        if factor in tokens
        for axis in by.axes
    }
    return (axis for axis in problem.stage.own if axis in cut)


def _layers(
    problem: Problem, before: Solution, groups: Mapping[str, Sharding], found: Sequence[int]
) -> dict[str, Layered]:
    """Return the search's styles of the layers; over two halves of an axis, the half that shards the layer decides.

    None of a layer that no style says: one that both halves cut along other dims, or a weight that is cut elsewhere
    than a plain placement does, or by one half alone.
    """
    axis, made, earlier = problem.stage.axis, dict[str, Layered](), {*problem.stage.axes} - {*problem.stage.own}
    is_second = not earlier.isdisjoint(before.model)
    for fqn, layer in problem.layers.items():
        style, dim = [*layer.styles.items()][found[layer.variable]]
        own = Layered(layer.name, style, dim)
        other = before.layers.get(fqn) if is_second else own
        is_plain = dim is None or groups[fqn].dims[dim].only(axis) == DimSharding.by(axis)
        if other == own and (is_plain or style in FEATURES):
            made[fqn] = own
        elif other is not None and {style, other.style} <= FEATURES and None in (dim, other.dim):
            made[fqn] = own if other.dim is None else other
    return made if problem.layers else dict(before.layers)


def _chosen(values: Values, found: Sequence[int]) -> Sharding:
    return values.shardings[0 if values.variable is None else found[values.variable]]


def _openings(
    problem: Problem, choices: Mapping[fx.Node, Choice], found: Sequence[int]
) -> Iterator[tuple[tuple[int, str], Set[Place]]]:
    """The calls that might do with less than what the solution gathers or reduces.

    Without a plan, where nearly everything may be cut, those whose operand is gathered for them. With one, those for
    which something is paid on the way from the weights that the plan names.
    """
    for domains in problem.alone:
        axis, is_searched = domains[0].stage.axis, domains[0].stage.is_searched
        for at, (alone, domain) in enumerate(zip(domains, problem.domains, strict=True)):
            openings = list(find_openings(alone))
            paid = _paid(problem, domain, axis, choices, found) if openings else set()
            for node, index, places in openings:
                operand = domain.operands[node][index]
                if not is_searched:
                    is_open = _comes_of(domain, operand, paid)
                else:
                    have = _chosen(problem.values[operand], found) if operand in problem.values else None
                    is_open = have is not None and axis in have.cut_axes
                    is_open = is_open and axis not in choices[node].wants[index].cut_axes
                    places = set() if have is None else find_places(alone, node, index, [have])
                if is_open:
                    yield (at, node.name), places


def _paid(
    problem: Problem, domain: Domain, axis: str, choices: Mapping[fx.Node, Choice], found: Sequence[int]
) -> Set[fx.Node]:
    """The values that are gathered or reduced over an axis."""
    paid = set[fx.Node]()
    for operand, want in _wanted(domain, choices):
        have = _chosen(problem.values[operand], found) if operand in problem.values else want
        if have != want and axis in have.axes and have.only(axis) != want.only(axis):
            paid.add(operand)
    return paid


def _wanted(domain: Domain, choices: Mapping[fx.Node, Choice]) -> Iterator[tuple[fx.Node, Sharding]]:
    """Every operand of every call, and what it must be."""
    for node, operands in domain.operands.items():
        if node in choices:
            yield from zip(operands, choices[node].wants, strict=True)


def _comes_of(domain: Domain, value: fx.Node, paid: Set[fx.Node]) -> bool:
    """True if a paid-for change lies between `value` and the nearest op that uses a planned weight."""
    ahead, seen = [value], set[fx.Node]()
    while ahead:
        value = ahead.pop()
        if value in paid:
            return True
        if value in seen or value.op == "placeholder":
            continue
        seen.add(value)
        operands = domain.operands[edit.producer(value)[0]]
        if any(o.name in domain.leaves and domain.leaves[o.name].is_fixed for o in operands):
            if not paid.isdisjoint(operands):
                return True
        else:
            ahead += operands
    return False
