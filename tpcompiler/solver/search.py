"""One search for the cheapest placements of all values: axis by axis, or over several axes at once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from operator import attrgetter

import numpy
from torch import fx

from tpcompiler.errors import UnsupportedError
from tpcompiler.ir import edit
from tpcompiler.ir.constraints import AsUsed
from tpcompiler.ir.dim_sharding import DimSharding
from tpcompiler.ir.sharding import Sharding
from tpcompiler.solver.changes import UNIT
from tpcompiler.solver.domain import Domain, find_shared_heads, find_tokens
from tpcompiler.solver.eliminate import TOO_SLOW, eliminate, solve
from tpcompiler.solver.pose import pose
from tpcompiler.solver.problem import FEATURES, NEVER, Problem, Values
from tpcompiler.solver.samples import find_sample_axes
from tpcompiler.solver.solution import Layered, Place, Solution, Turns, join_places
from tpcompiler.solver.stage import MOST_CHOICES, Choice, Known, Stage
from tpcompiler.solver.task import Task
from tpcompiler.solver.variants import find_openings, find_places

FEWER = (MOST_CHOICES, 8, 4, 2, 1)  # choices of an op, as long as the tables are too large
REFUSED = 0.05  # seconds for a weight that would be gathered, where nothing else can be: more than all else


def _stage_of(task: Task, axes: tuple[str, ...], before: Mapping[fx.Node, Choice], most: int) -> Stage:
    mesh, axis = task.programs[0].mesh, axes[-1]
    rest = task.programs[0].rest if axis in task.model_axes else AsUsed()
    inputs = [own.constraints[node.name].sharding for own in task.programs for node in own.user_inputs()]
    is_open = task.is_searched and axis not in task.model_axes and not any(axis in own.axes for own in inputs)
    known = task.known.once(("over", mesh, axes, rest, most, is_open), Known)
    return Stage(mesh, axes, before, rest, task.known, most, is_open, known=known)


def search(task: Task) -> Solution:
    """Find the cheapest placements of all values, over all axes of the mesh at once.

    Where the tables are too large for that, or layers are cut over two axes, one axis after the other, each exactly:
    in two orders, of which the better result counts.

    Raises:
        UnsupportedError: as `eliminate.solve`; axes that the task wants solved at once have too many choices together.
    """
    task.tally.searches += 1
    if task.turns:
        return _search_in_turns(task, task.turns)
    mesh, programs = task.programs[0].mesh, task.programs
    model = [axis for axis in task.model_axes if mesh.degree(axis) > 1]
    others = [axis for axis in mesh.names if mesh.degree(axis) > 1 and axis not in model]
    if len(others) + len(model) > 1:
        with suppress(UnsupportedError):
            return _search_in_turns(task, ((*others, *model),))
    samples = [axis for axis in others if axis in find_sample_axes(programs)]  # a small batch has one dim for them
    rest = [axis for axis in others if axis not in samples]
    first = _search_in_order(task, (*samples, *model, *rest))  # what the first cut, others reduce less of
    best, second = first, (*others, *model) if first.seconds < math.inf else (*model, *rest, *samples)
    if second != (*samples, *model, *rest):  # also where samples leave no way to cut layers
        with suppress(UnsupportedError):
            best = min(first, _search_in_order(task, second), key=attrgetter("seconds"))
    return best


def _search_in_order(task: Task, axes: Sequence[str]) -> Solution:
    return _search_in_turns(task, tuple((axis,) for axis in axes) or ((task.programs[0].mesh.model_axis,),))


def _search_in_turns(task: Task, turns: Turns) -> Solution:
    programs, objective, held, model = task.programs, task.objective, task.held, task.model_axes
    heads = list[tuple[str, int, bool]]()
    found = Solution(programs, objective.machine, model=model, optimizer=objective.optimizer)
    groups, solved = dict[str, Sharding](), list[tuple[str, ...]]()
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
        if values is None and not stage.is_searched and held is None:
            problem = pose(programs, stage, objective, groups, REFUSED)
            values = _solved(problem)
        if values is None:
            return Solution(programs, objective.machine, seconds=math.inf)
        found, groups = _read(problem, found, *values)
        solved += [own for own in [_open_axes(problem)] if own]
        heads += [
            (part.axis, *shared)
            for part, domains in zip(stage.parts or (stage,), problem.alone, strict=True)
            for domain in domains
            for shared in sorted(find_shared_heads(domain))
        ]
    return replace(found, turns=tuple(solved), heads=tuple(dict.fromkeys(heads)))


def _open_axes(problem: Problem) -> tuple[str, ...]:
    """Return the axes over which a problem has choices."""
    if len(problem.stage.own) == 1 or not problem.tables.sizes:
        return problem.stage.own if problem.tables.sizes else ()
    return tuple(
        axis
        for axis, domains in zip(problem.stage.own, problem.alone, strict=True)
        if any(len(ways.found) > 1 for domain in domains for ways in domain.ways.values())
    )


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
    """Yield the axes of a search that may cut the batch of whole inputs over which it does."""
    is_open = {part.axis for part in problem.stage.parts or (problem.stage,) if part.is_open}
    domains = problem.domains if problem.stage.gathers else ()
    tokens = {node: own for domain in domains for node, own in find_tokens(domain).items()}
    cut = {
        axis
        for node, choice in choices.items()
        for factor, by in choice.option.cuts.items()
        for axis in by.axes
        if axis in is_open or factor in tokens.get(node, ())
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
