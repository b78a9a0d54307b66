"""Search for the cheapest placements of all values, axis by axis and over several axes at once."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy
from torch import fx

from tpcompiler.cost.objective import Objective
from tpcompiler.errors import UnsupportedError
from tpcompiler.ir.dim_sharding import DimSharding
from tpcompiler.ir.program import PlannedProgram
from tpcompiler.ir.sharding import Sharding
from tpcompiler.ir.split_axis import keeps_shares, on_split_axis
from tpcompiler.solver.changes import UNIT
from tpcompiler.solver.domain import Domain, find_shared_heads
from tpcompiler.solver.eliminate import TOO_SLOW, eliminate, solve
from tpcompiler.solver.problem import FEATURES, NEVER, Problem, Values, pose
from tpcompiler.solver.solution import Layered, Solution, Turns
from tpcompiler.solver.stage import MOST_CHOICES, Choice, Known, Stage
from tpcompiler.solver.variants import find_needed, find_openings, write_variants

# Variables of a problem, and which of its values each may take.
Held = Callable[[Problem], Iterable[tuple[int, Sequence[bool]]]]
FEWER = (MOST_CHOICES, 8, 4, 2, 1)  # choices of an op, as long as the tables are too large without a plan
CLOSE = 1.001  # of a bound, within which no better solution is looked for
REFUSED = 0.05  # seconds for a weight that would be gathered, where nothing else can be: more than all else


def search(
    programs: Sequence[PlannedProgram],
    objective: Objective,
    free: bool = False,
    gathers: bool = False,
    read: Known | None = None,
) -> Solution:
    """The cheapest placements of all values of programs that share their leaves.

    One axis after the other, each exactly, then all at once. An axis is two where that shares heads of which there are
    fewer than ranks. Ops that need a dim whole which may be cut are also tried in simpler ones, where that is cheaper.

    Args:
        free: without a plan for the axis of the model.
        gathers: then also with weights gathered, and the batch cut.
        read: what searches on the same machine found before.
    """
    how = objective, free, gathers, Known() if read is None else read
    best = _over_all_axes(_in_any_ops(programs, *how), *how)
    if free and any(program.kept for program in programs):
        # What is kept to may hide ops or a mesh that lead there: those that pay without it are tried too.
        rest = _over_all_axes(_in_any_ops([replace(program, kept={}) for program in programs], *how), *how)
        if (rest.simpler, rest.mesh) != (best.simpler, best.mesh):
            same = [program for program, _ in _write(programs, rest.simpler, Known())]
            for axis in programs[0].mesh.names if rest.mesh != programs[0].mesh else ():
                if axis not in rest.mesh.names:
                    same = [on_split_axis(program, axis, rest.mesh.degree(f"{axis}_0")) for program in same]
            found = replace(search_over(same, objective, rest.model, *how[1:])[0], simpler=rest.simpler)
            found = _over_all_axes(found, *how)
            best = found if found.seconds == rest.seconds else min(best, found, key=lambda each: each.seconds)
    return best


def _in_any_ops(
    programs: Sequence[PlannedProgram], objective: Objective, free: bool, gathers: bool, read: Known
) -> Solution:
    """The solution with the ops in simpler ones that gain by it."""
    best = search_on_any_mesh(programs, objective, free, gathers, read)
    openings, bodies = best.openings, Known()
    while openings:
        pairs = _write(programs, openings, bodies)
        found = search_on_any_mesh([program for program, _ in pairs], objective, free, gathers, read)
        if found.seconds > best.seconds or (found.seconds == best.seconds and not best.simpler):
            break
        best = replace(found, simpler=openings)
        needed = {
            (at, name)
            for at, (program, (_, written)) in enumerate(zip(programs, pairs, strict=True))
            for name in find_needed(program, written, found.programs[at].graph, found.choices, found.mesh)
        }
        if needed in (openings, set()):
            break
        openings = needed
    return best


def _write(
    programs: Sequence[PlannedProgram], calls: Set[tuple[int, str]], bodies: Known
) -> list[tuple[PlannedProgram, dict[str, list[str]]]]:
    return [
        write_variants(program, {name for at, name in calls if at == own}, bodies)
        for own, program in enumerate(programs)
    ]


def search_on_any_mesh(
    programs: Sequence[PlannedProgram],
    objective: Objective,
    free: bool,
    gathers: bool,
    read: Known | None = None,
    model: tuple[str, ...] = (),
    held: Held | None = None,
) -> Solution:
    """The solution over the mesh, or over the mesh with an axis as two: as `search_over`, without simpler ops."""
    model = model or (programs[0].mesh.model_axis,)
    best, heads = search_over(programs, objective, model, free, gathers, read, held)
    for axis, outer in heads:
        if not all(keeps_shares(program, axis, outer) for program in programs):
            continue
        split = [on_split_axis(program, axis, outer) for program in programs]
        halves = tuple(half for each in model for half in ((f"{each}_0", f"{each}_1") if each == axis else (each,)))
        found, _ = search_over(split, objective, halves, free, gathers, read, held)
        best = min(best, found, key=lambda solution: solution.seconds)
    return best


def _over_all_axes(found: Solution, objective: Objective, free: bool, gathers: bool, read: Known) -> Solution:
    """Without a plan, a solution over one axis after the other, if it is close to the bound; otherwise the best of it
    and of one over all axes at once, or in the other order where their tables are too large.
    """
    solved = [axis for turn in found.turns for axis in turn]
    others = tuple(axis for axis in solved if axis not in found.model)
    axes = (*others, *(axis for axis in solved if axis in found.model))
    if not free or not others or len(axes) == 1:
        return found
    bound = _find_bound(found, axes, objective, gathers, read)
    turns: list[Turns] = [tuple((axis,) for axis in axes)]
    if len(others) == len(axes) - 1:  # a layer is cut over one axis a turn
        turns.insert(0, (axes,))
    for each in turns if found.seconds > CLOSE * bound else ():
        try:
            other, _ = search_over(found.programs, objective, found.model, free, gathers, read, turns=each)
        except UnsupportedError:
            continue
        found = min(found, replace(other, simpler=found.simpler), key=lambda solution: solution.seconds)
        bound = other.seconds if each == (axes,) else bound
        break
    return replace(found, bound=min(found.seconds, bound))


def _find_bound(found: Solution, axes: Sequence[str], objective: Objective, gathers: bool, read: Known) -> float:
    """Seconds that no placement over these axes takes less than.

    Each axis by itself, with all that there is cut evenly over the other axes for nothing. What a placement over all
    axes does over that one is a placement of this problem, which costs no more there: a rank has no less than its even
    share to work at, to hold and to send.
    """
    least = 0.0
    for axis in axes:
        relaxed = objective._replace(spread=found.mesh.size([other for other in axes if other != axis]))
        for most in FEWER:
            stage = Stage(found.mesh, (axis,), {}, axis in found.model, gathers and axis in found.model, read, most)
            with suppress(UnsupportedError):
                least = max(least, (_solved(pose(found.programs, stage, relaxed, {})) or (0.0,))[0])
                break
    return least


def search_over(
    programs: Sequence[PlannedProgram],
    objective: Objective,
    model: tuple[str, ...],
    free: bool,
    gathers: bool,
    read: Known | None = None,
    held: Held | None = None,
    turns: Turns = (),
) -> tuple[Solution, list[tuple[str, int]]]:
    """The solution over the axes in turns; and how many heads ranks could share, by axis.

    Args:
        read: what was found before of the same graphs, and for the same objective.
        held: what some variables of a turn may be; then no weight is gathered, whatever it is for.
        turns: by default the `model` axes one by one, then the others.

    Raises:
        UnsupportedError: as `solve`; axes that are solved at once have too many choices together.
    """
    mesh, found, heads = programs[0].mesh, Solution(programs, objective.machine, model=model), list[tuple[str, int]]()
    groups, solved = dict[str, Sharding](), list[tuple[str, ...]]()
    read = Known() if read is None else read
    order = [*model, *(axis for axis in mesh.names if axis not in model)]  # what the first cut, others reduce less of
    turns = turns or tuple((axis,) for axis in order if mesh.degree(axis) > 1) or ((order[-1],),)
    for at, turn in enumerate(turns):
        before = tuple(axis for each in turns[:at] for axis in each)
        for most in FEWER:
            parts = [
                Stage(
                    mesh, (*before, axis), found.choices, free and axis in model, gathers and axis in model, read, most
                )
                for axis in turn
            ]
            stage = parts[0] if len(parts) == 1 else Stage.together(parts)
            problem = pose(programs, stage, objective, groups)
            for variable, allowed in held(problem) if held else ():
                problem.tables.price([variable], numpy.where(allowed, 0.0, NEVER))
            try:
                values = _solved(problem)
                break
            except UnsupportedError:
                if not stage.free or stage.parts or held or most == FEWER[-1]:
                    raise
        if values is None and not stage.free and held is None:
            problem = pose(programs, stage, objective, groups, REFUSED)
            values = _solved(problem)
        if values is None:
            return Solution(programs, objective.machine, seconds=math.inf), []
        found, groups = _read(problem, found, *values)
        solved += [turn] if problem.tables.sizes else []
        heads += [
            (part.axis, outer)
            for part, domains in zip(stage.parts or (stage,), problem.alone, strict=True)
            for domain in domains
            for outer in sorted(find_shared_heads(domain))
        ]
    return replace(found, turns=tuple(solved), bound=found.seconds), list(dict.fromkeys(heads))


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
        groups.setdefault(group, next(iter(own)) if len(own) == 1 else Sharding.replicated(node.meta["val"].ndim))
    solution = Solution(
        problem.programs,
        before.machine,
        choices,
        {node: groups[group] for node, group in problem.groups.items()},
        {node: _chosen(values, found) for node, values in problem.settled.items()},
        _layers(problem, before, groups, found),
        seconds,
        before.capped + problem.capped,
        before.openings | set(_openings(problem, choices, found)),
        model=before.model,
    )
    return solution, groups


def _layers(
    problem: Problem, before: Solution, groups: Mapping[str, Sharding], found: Sequence[int]
) -> dict[str, Layered]:
    """What the search made of the layers, over two halves of an axis as the one that cuts a layer does.

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


def _openings(problem: Problem, choices: Mapping[fx.Node, Choice], found: Sequence[int]) -> Iterator[tuple[int, str]]:
    """The calls that might do with less than what the solution gathers or reduces.

    Without a plan, where nearly everything may be cut, those whose operand is gathered for them. With one, those for
    which something is paid on the way from the weights that the plan names.
    """
    for domains in problem.alone:
        axis, is_free = domains[0].stage.axis, domains[0].stage.free
        for at, (alone, domain) in enumerate(zip(domains, problem.domains, strict=True)):
            openings = list(find_openings(alone))
            paid = _paid(problem, domain, axis, choices, found) if openings else set()
            for node, index in openings:
                operand = domain.operands[node][index]
                if not is_free:
                    is_open = _comes_of(domain, operand, paid)
                else:
                    is_cut = operand in problem.values and axis in _chosen(problem.values[operand], found).cut_axes
                    is_open = is_cut and axis not in choices[node].wants[index].cut_axes
                if is_open:
                    yield at, node.name


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
    """Whether one of `paid` lies between a value and what the nearest planned weights are used with."""
    ahead, seen = [value], set[fx.Node]()
    while ahead:
        value = ahead.pop()
        if value in paid:
            return True
        if value in seen or value.op == "placeholder":
            continue
        seen.add(value)
        source: Any = value.args[0] if value.target is operator.getitem else value
        operands = domain.operands[source]
        if any(o.name in domain.leaves and domain.leaves[o.name].seed is not None for o in operands):
            if not paid.isdisjoint(operands):
                return True
        else:
            ahead += operands
    return False
