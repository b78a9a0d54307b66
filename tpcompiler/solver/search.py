"""One search for the cheapest placements of all values: axis by axis, or over several axes at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import NamedTuple

from torch import fx

from tpcompiler.cost.collective import KINDS
from tpcompiler.cost.objective import Objective
from tpcompiler.errors import TpCompilerError, UnsupportedError
from tpcompiler.ir import edit
from tpcompiler.ir.constraints import AnyStyle, AsUsed, Constraint, Dims
from tpcompiler.ir.dim_sharding import DimSharding
from tpcompiler.ir.local import no_new_guards
from tpcompiler.ir.memo import Memo
from tpcompiler.ir.program import PlannedProgram, relax
from tpcompiler.ir.sharding import Sharding
from tpcompiler.ir.split_axis import keeps_shares, on_split_axis
from tpcompiler.solver.batch_dims import find_sample_axes
from tpcompiler.solver.build_problem import build_problem, find_program_kernels
from tpcompiler.solver.domain import Domain, find_open_axes, find_shared_heads, find_tokens
from tpcompiler.solver.estimate import Memory, measure_memory, sends_of
from tpcompiler.solver.minimize import MOST_JOINT_CELLS, eliminate, minimize
from tpcompiler.solver.problem import FEATURES, UNIT, Problem, Values
from tpcompiler.solver.solution import Layered, Openings, Place, Solution, Turns, join_places
from tpcompiler.solver.task import Styles, Task
from tpcompiler.solver.turn import MOST_CHOICES, Strategy, Turn
from tpcompiler.solver.variants import find_needed, find_openings, find_places, write_variants
from tpcompiler.terminal.progress import counted

FEWER = (MOST_CHOICES, 8, 4, 2, 1)  # choices of an op, as long as the tables are too large
REFUSED = 0.05  # seconds for a weight that would be gathered, where nothing else can be: more than all else


def _turn_of(task: Task, axes: tuple[str, ...], before: Mapping[fx.Node, Strategy], most: int) -> Turn:
    mesh, axis = task.programs[0].mesh, axes[-1]
    rest = task.programs[0].rest if axis in task.model_axes else AsUsed()
    is_open = task.is_searched and axis not in task.model_axes
    known = task.known.once(("over", mesh, axes, rest, most, is_open), Memo)
    return Turn(mesh, axes, before, rest, task.known, most, is_open, known=known)


def search(task: Task) -> Solution:
    """Find the cheapest placements of all values.

    Over all axes of the mesh at once, and one axis after the other, each exactly: of equals the first. A choice over
    one axis may depend on one over another, which only turns take up. Axes take turns in two orders where the tables of
    all at once are too large, or one runs as several: a layer is cut over one axis at a time, and a value that is cut
    over two along the same dim is so given the first.

    Raises:
        UnsupportedError: as `minimize`; axes that the task wants solved at once have too many choices together.
    """
    task.tally.searches += 1
    if task.turns:
        return _search_in_turns(task, task.turns)
    mesh = task.programs[0].mesh
    model = [axis for axis in task.model_axes if mesh.degree(axis) > 1]
    others = [axis for axis in mesh.names if mesh.degree(axis) > 1 and axis not in model]
    samples = [axis for axis in others if axis in find_sample_axes(task.programs)]  # a small batch has one dim for them
    rest = [axis for axis in others if axis not in samples]
    found = [_search_in_order(task, order := (*samples, *model, *rest))]  # what the first cut, others reduce less of
    if len(order) > 1 and not mesh.factors:
        with suppress(UnsupportedError):
            found.insert(0, _search_in_turns(task, ((*others, *model),)))
    if len(found) == 1:  # also where samples leave no way to cut layers
        last = model if found[0].layers else model[-1:]
        second = (*model[: -len(last)], *others, *last) if found[0].seconds < math.inf else (*model, *rest, *samples)
        with suppress(UnsupportedError):
            found += [_search_in_order(task, second)] if second != order else []
    openings = join_places(own for each in found for own in each.openings.items())
    return replace(min(found, key=attrgetter("seconds")), openings=openings)


def _search_in_order(task: Task, axes: Sequence[str]) -> Solution:
    return _search_in_turns(task, tuple((axis,) for axis in axes) or ((task.programs[0].mesh.model_axis,),))


def _search_in_turns(task: Task, turns: Turns) -> Solution:
    programs, objective, fixed, model = task.programs, task.objective, task.fixed, task.model_axes
    heads = list[tuple[str, int, bool]]()
    found = Solution(programs, objective.machine, model=model, optimizer=objective.optimizer)
    groups, solved = dict[str, Sharding](), list[tuple[str, ...]]()
    for at, axes in enumerate(turns):
        before = tuple(axis for each in turns[:at] for axis in each)
        for most in FEWER:
            parts = [_turn_of(task, (*before, axis), found.choices, most) for axis in axes]
            turn = parts[0] if len(parts) == 1 else Turn.together(parts)
            kept = None if before else task.kept
            build = partial(_build, task, turn, groups)
            problem = build() if kept is None else kept.once((*programs, axes, most), build)
            try:
                values = _solved(problem, objective, fixed(problem) if fixed else ())
                break
            except UnsupportedError:
                if turn.parts or fixed or most == FEWER[-1]:
                    raise
        if values is None and not turn.is_searched and fixed is None:
            problem = build_problem(programs, turn, objective, groups, REFUSED)
            values = _solved(problem, objective)
        if values is None:
            return Solution(programs, objective.machine, seconds=math.inf)
        found, groups = _read(problem, found, *values)
        solved += [own for own in [_open_axes(problem)] if own]
        heads += [
            (part.axis, *shared)
            for part, domains in zip(turn.parts or (turn,), problem.alone, strict=True)
            for domain in domains
            for shared in sorted(problem.known.once(("heads", domain), partial(find_shared_heads, domain)))
        ]
    return replace(found, turns=tuple(solved), heads=tuple(dict.fromkeys(heads)))


def _build(task: Task, turn: Turn, groups: Mapping[str, Sharding]) -> Problem:
    problem = build_problem(task.programs, turn, task.objective, groups)
    task.tally.prices += problem.tables.count_cells()
    return problem


def _open_axes(problem: Problem) -> tuple[str, ...]:
    """Return the axes over which a problem has choices."""
    if len(problem.turn.own) == 1 or not problem.tables.sizes:
        return problem.turn.own if problem.tables.sizes else ()
    return tuple(
        axis
        for axis, domains in zip(problem.turn.own, problem.alone, strict=True)
        if any(len(strategies.found) > 1 for domain in domains for strategies in domain.strategies.values())
    )


def _solved(
    problem: Problem, objective: Objective, fixed: Iterable[tuple[int, Sequence[bool]]] = ()
) -> tuple[float, list[int]] | None:
    tables = problem.tables_at(objective.byte_price, fixed)
    cost, values = eliminate(tables, MOST_JOINT_CELLS) if problem.turn.parts else minimize(tables)
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
        {domain.program.graph: domain.kernels for domain in problem.domains},
        seconds,
        before.capped + problem.capped,
        join_places([*before.openings.items(), *_openings(problem, choices, found)]),
        model=before.model,
        optimizer=before.optimizer,
        batch=(*before.batch, *_axes_of_batch(problem, choices)),
    )
    return solution, groups


def _axes_of_batch(problem: Problem, choices: Mapping[fx.Node, Strategy]) -> Iterator[str]:
    """Yield the axes of a search that may cut the batch of whole inputs over which it does."""
    cut = set[str]()
    for domain in problem.domains:
        tokens = find_tokens(domain) if problem.turn.gathers else {}
        shared = find_open_axes(problem.turn, domain.program)
        for node in domain.strategies.keys() & choices.keys():
            for factor, by in choices[node].option.cuts.items():
                cut |= {axis for axis in by.axes if axis in shared or factor in tokens.get(node, ())}
    return (axis for axis in problem.turn.own if axis in cut)


def _layers(
    problem: Problem, before: Solution, groups: Mapping[str, Sharding], found: Sequence[int]
) -> dict[str, Layered]:
    """Return the search's styles of the layers; over two halves of an axis, the half that shards the layer decides.

    None of a layer that no style says: one that both halves cut along other dims, or a weight that is cut elsewhere
    than a plain placement does, or by one half alone.
    """
    axis, made, earlier = problem.turn.axis, dict[str, Layered](), {*problem.turn.axes} - {*problem.turn.own}
    is_second = not earlier.isdisjoint(before.model)
    for fqn, layer in problem.layers.items():
        style, dim = [*layer.styles.items()][found[layer.variable]]
        own = Layered(layer.name, style, dim)
        other = before.layers.get(fqn) if is_second else own
        is_plain = dim is None or groups[fqn].dims[dim].axis_part(axis) == DimSharding.by(axis)
        if other == own and (is_plain or style in FEATURES):
            made[fqn] = own
        elif other is not None and {style, other.style} <= FEATURES and None in (dim, other.dim):
            made[fqn] = own if other.dim is None else other
    return made if problem.layers else dict(before.layers)


def _chosen(values: Values, found: Sequence[int]) -> Sharding:
    return values.shardings[0 if values.variable is None else found[values.variable]]


def _openings(
    problem: Problem, choices: Mapping[fx.Node, Strategy], found: Sequence[int]
) -> Iterator[tuple[tuple[int, str], Set[Place]]]:
    """The calls that might do with less than what the solution gathers or reduces.

    Without a plan, where nearly everything may be cut, those whose operand is gathered for them. With one, those for
    which something is paid on the way from the weights that the plan names.
    """
    for domains in problem.alone:
        axis, is_searched = domains[0].turn.axis, domains[0].turn.is_searched
        for at, (alone, domain) in enumerate(zip(domains, problem.domains, strict=True)):
            find = partial(list[tuple[fx.Node, int, Set[Place]]], find_openings(alone))
            openings = problem.known.once(("openings", alone), find)
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
    problem: Problem, domain: Domain, axis: str, choices: Mapping[fx.Node, Strategy], found: Sequence[int]
) -> Set[fx.Node]:
    """The values that are gathered or reduced over an axis."""
    paid = set[fx.Node]()
    for operand, want in _wanted(domain, choices):
        have = _chosen(problem.values[operand], found) if operand in problem.values else want
        if have != want and axis in have.axes and have.axis_part(axis) != want.axis_part(axis):
            paid.add(operand)
    return paid


def _wanted(domain: Domain, choices: Mapping[fx.Node, Strategy]) -> Iterator[tuple[fx.Node, Sharding]]:
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


Again = Callable[[Task], Solution]
MOST_TRIALS = 12  # of prices of a byte, until placements fit
STEPS = 16.0  # by which the price of a byte grows until they do
DEAREST = 1e-7  # seconds for a byte: the fewest bytes win, whatever a call takes
MOST_ENTRIES = 32  # of a plan that are left out in turn to find those that conflict


def cut_shared_heads(task: Task, best: Solution, again: Again) -> Solution:
    """Search with an axis as two where it has more ranks than there are heads: keys are then whole over one of them,
    and queries cut along their heads or their steps.
    """
    for axis, outer, is_inner_first in best.heads:
        if task.ends():
            break
        if axis in dict(best.mesh.axes) and all(keeps_shares(program, axis, outer) for program in task.programs):
            split = [on_split_axis(program, axis, outer) for program in task.programs]
            parts = split[0].mesh.parts_of(axis)
            halves = parts[::-1] if is_inner_first else parts
            model = tuple(half for each in task.model_axes for half in (halves if each == axis else (each,)))
            halved = replace(task, programs=split, model=model)
            found = again(halved)
            best = min(best, found, key=_seconds)
    return best


def write_simpler_ops(task: Task, best: Solution, again: Again) -> Solution:
    """Search with ops in simpler ones, where a dim that they need whole may be cut; keep those that gain by it."""
    openings, bodies = best.openings, Memo()
    while openings and not task.ends():
        pairs = _written(task.programs, openings, bodies)
        found = again(replace(task, programs=[program for program, _ in pairs]))
        if found.seconds > best.seconds or (found.seconds == best.seconds and not best.simpler):
            break
        needed = join_places(
            ((at, name), places)
            for at, (program, (_, written)) in enumerate(zip(task.programs, pairs, strict=True))
            for name, places in find_needed(program, written, found.programs[at].graph, found.choices, found.mesh)
        )
        if not needed:  # they seem faster only as they are, which their ops' own kernels would not be
            break
        best = replace(found, simpler=openings)
        if needed == openings:
            break
        openings = needed
    return best


def _written(
    programs: Sequence[PlannedProgram], calls: Openings, bodies: Memo
) -> list[tuple[PlannedProgram, dict[str, list[str]]]]:
    return [
        write_variants(program, {name: places for (at, name), places in calls.items() if at == own}, bodies)
        for own, program in enumerate(programs)
    ]


def ignore_plan(task: Task, best: Solution, again: Again) -> Solution:
    """Search without the plan for the simpler ops and the mesh that its layers may hide; then with it on these."""
    if not any(own.narrows for program in task.programs for own in program.planned.values()):
        return best
    relaxed = [relax(program, attrgetter("narrows")) for program in task.programs]
    left = ((program.graph, *program.constraints.items()) for program in relaxed)  # equal for all plans that narrow
    known = "without the plan", task.objective[1:], task.model, *left
    rest = task.known.once(known, lambda: again(replace(task, programs=relaxed)))
    is_far = task.limit is not None and not math.isinf(rest.seconds) and measure_memory(rest).total > task.limit
    freed = math.inf if is_far else rest.seconds
    if (rest.simpler, rest.mesh) == (best.simpler, best.mesh):
        return replace(best, freed=freed)
    mesh = task.programs[0].mesh
    same = [program for program, _ in _written(task.programs, rest.simpler, Memo())]
    for axis, (outer, *_) in rest.mesh.factors if rest.mesh != mesh else ():
        same = [on_split_axis(program, axis, outer) for program in same]
    own = replace(task, programs=same, model=rest.model)
    found = replace(search(own), simpler=rest.simpler)
    best = found if found.seconds == rest.seconds else min(best, found, key=_seconds)
    return replace(best, freed=freed)


def fit_memory(task: Task, best: Solution, again: Again) -> Solution:
    """Find the highest price of a byte of weights at which a rank holds too much, and the lowest at which it does not.

    See Everett, "Generalized Lagrange multiplier method", 1963. The optimum at each price bounds the cheapest
    placements that fit from below. Of the layers that differ between the two, as many are cut as where too much is held
    as fit. The programs are those of the fastest placements, and of those with the fewest bytes. Without any that fit,
    the result is the fastest, marked as too large.
    """
    if task.limit is None or math.isinf(best.seconds) or (least := measure_memory(best)).total <= task.limit:
        return best
    fitting, bounds = list[Solution](), list[float]()
    if task.is_searched:
        smallest = again(replace(task, objective=task.objective._replace(byte_price=DEAREST)))
        for form in {tuple(map(id, each.programs)): each for each in (best, smallest)}.values():
            fitter = _Fitter(replace(task, programs=form.programs, model=form.model, kept=Memo()), task.limit)
            fitting += (replace(each.found, simpler=form.simpler) for each in fitter.fit())
            bounds.append(fitter.bound)
            least = min(least, *fitter.seen, key=lambda each: each.total)
    if not fitting:
        return replace(best, too_large=least)
    return replace(min(fitting, key=_seconds), is_tight=True, bound=min(bounds), freed=None)


class _Trial(NamedTuple):
    """A solution, with its seconds at the task's own price of a byte, and the memory of a rank."""

    found: Solution
    memory: Memory


class _Fitter:
    """The search for placements of some programs that fit a rank, in one problem that is solved many times.

    Attributes:
        seen: the memory of a rank in every trial.
        bound: seconds that no placement that fits takes less than; 0 if that is unknown.
    """

    def __init__(self, task: Task, limit: int) -> None:
        self.task, self.limit, self.seen, self.bound = task, limit, list[Memory](), 0.0

    def fit(self) -> Iterator[_Trial]:
        """Yield the best trial that fits, if any does."""
        fast, small, low, high = self._price_bytes(1.0), None, 1.0, math.inf
        dearest, times = DEAREST / self.task.objective.byte_price, STEPS
        for _ in counted(range(MOST_TRIALS), "making it fit", "searches"):
            if fast is None or low >= dearest:
                return
            trial = self._price_bytes(times)
            if trial is not None and trial.memory.total <= self.limit:
                small, high = trial, times
            else:
                fast, low = trial or fast, times
            times = min(times * STEPS, dearest) if small is None else math.sqrt(low * high)
        assert fast is not None
        assert small is not None
        apart = [weight for weight, own in small.found.layers.items() if fast.found.layers.get(weight) != own]
        best, fits, over = small, -1, len(apart)
        while over - fits > 1:
            count = (fits + over) // 2
            mixed = self._mix(small.found, fast.found, apart[:count])
            if mixed is not None and mixed.memory.total <= self.limit:
                fits, best = count, min(best, mixed, key=lambda each: each.found.seconds)
            else:
                over = count
        yield best

    def _price_bytes(self, times: float) -> _Trial | None:
        """Return the best placements where a byte has so many times its price, if there are any."""
        objective, limit = self.task.objective, self.limit
        found = search(replace(self.task, objective=objective._replace(byte_price=objective.byte_price * times)))
        if math.isinf(found.seconds):
            return None
        memory, more = measure_memory(found), times - 1
        self.seen.append(memory)
        grown = memory.floats + memory.gradients + memory.state  # with weights
        room = (limit - memory.total + grown) * memory.floats / max(1, grown)  # for weights
        if found.above == 0.0:
            self.bound = max(self.bound, found.seconds - more * objective.storage_seconds(room))
        return _Trial(replace(found, seconds=found.seconds - more * objective.storage_seconds(memory.floats)), memory)

    def _mix(self, small: Solution, fast: Solution, fast_layers: Collection[str]) -> _Trial | None:
        """Return the best placements with layers cut as in one solution, and some of them as in another."""

        def fixed(problem: Problem) -> Iterator[tuple[int, list[bool]]]:
            for weight, layer in problem.layers.items() if small.model[0] in problem.turn.own else ():
                if (own := (fast if weight in fast_layers else small).layers.get(weight)) is not None:
                    yield layer.variable, [dim == own.dim for dim in layer.styles.values()]

        found = search(replace(self.task, fixed=fixed))
        return None if math.isinf(found.seconds) else _Trial(found, measure_memory(found))


def _keeping(program: PlannedProgram, found: Solution) -> PlannedProgram:
    """Return the program with its layers cut as in a solution; where in its dim each is cut stays open."""
    axis, constraints = program.mesh.model_axis, dict(program.constraints)
    for node, fqn in program.leaves():
        if (layer := found.layers.get(fqn)) is not None:
            whole = Sharding.replicated(edit.ndim(node))
            sharding = whole if layer.dim is None else whole.with_dim(layer.dim, DimSharding.by(axis))
            allowed = AnyStyle(Dims((sharding,)))
            constraints.setdefault(node.name, Constraint(allowed, "the search", fqn))
    return replace(program, constraints=constraints)


def take_forms(task: Task, best: Solution, again: Again) -> Solution:
    """Search with the programs in other forms, one after the other, and keep each that is better."""
    best = replace(best, given=task.programs)
    if task.forms is None or math.isinf(best.seconds) or not _could_gain(task, best):
        return best
    for find in task.forms.finders:
        if not best.lacks_memory and task.ends():
            break
        styles: Styles = {}
        try:
            styles = dict(find(best))
            forms = (*best.forms, styles)
            if not (programs := task.forms.plan(forms)):
                continue
            with no_new_guards(*(program.graph for program in programs)):
                found = again(replace(task, programs=programs))
                is_placed = found.seconds < math.inf and not found.lacks_memory
                is_least = is_placed and found.above == 0.0 and not found.capped
                if not (is_least or found.rank < best.rank):  # fewer choices of a smaller problem may be left out
                    kept = [_keeping(program, best) for program in programs]
                    found = min(found, again(replace(task, programs=kept)), key=lambda each: each.rank)
        except TpCompilerError as error:
            best = replace(best, declined=(*best.declined, *_declined(task, styles, error.message)))
            continue
        if math.isinf(found.seconds):
            declined = _declined(task, styles, "no placement of all values suits it")
            best = replace(best, declined=(*best.declined, *declined))
        elif found.rank < best.rank:
            best = replace(found, given=programs, forms=forms, declined=best.declined)
    return best


def _could_gain(task: Task, best: Solution) -> bool:
    """Return False if ranks send nothing, and what they could share takes less time than one collective.

    Kernels start as often in every form, and a form that shares anything sends something for the results, which are
    whole on every rank.
    """
    returned = (value for own in best.programs for value in own.output.all_input_nodes if edit.is_tensor(value))
    if best.lacks_memory or not all(best.seen(value).is_replicated for value in returned) or any(sends_of(best)):
        return True
    objective, mesh, floors = task.objective, best.mesh, 0.0
    for at, program in enumerate(best.programs):
        kernels = find_program_kernels(program.graph, objective, task.known)
        floors += objective.weight(at) * sum(map(objective.floor_seconds, kernels.values()))
    saved = (best.seconds - floors) * (1 - 1 / mesh.size(mesh.names))
    sent = (objective.machine.collective_seconds(kind, [axis], 0, mesh) for kind in KINDS for axis in mesh.names)
    return saved >= min(sent) * min(map(objective.weight, range(len(best.programs))))


def _declined(task: Task, styles: Styles, reason: str) -> Iterator[str]:
    """Report that a form cannot be had, unless the plan places a weight in it otherwise."""
    narrowed = [own for program in task.programs for own in program.planned.values() if own.narrows]
    if not any(f"{own.leaf}.".startswith(f"{name}.") for own in narrowed for name in styles):
        tried = ", ".join(dict.fromkeys(styles.values())) or "another form"
        yield f"{tried} was tried, and cannot be had: {reason}"


def find_conflict(task: Task, best: Solution, again: Again) -> Solution:
    """Find conflicting entries of a plan that nothing satisfies: without any one of them, the others can be satisfied.

    By a deletion filter (Chinneck and Dravnieks, "Locating minimal infeasible constraint sets in linear programs",
    1991).
    """
    if not math.isinf(best.seconds):
        return best

    def fails_with(entries: Sequence[str]) -> bool:
        fewer = [relax(program, lambda own: own.asked_by not in entries) for program in task.programs]
        return math.isinf(again(replace(task, programs=fewer, limit=None, forms=None)).seconds)

    kept = list(dict.fromkeys(own.asked_by for program in task.programs for own in program.planned.values()))
    for entry in counted(kept[:MOST_ENTRIES], "looking for what conflicts", "entries"):
        rest = [each for each in kept if each != entry]
        kept = rest if fails_with(rest) else kept
    return replace(best, conflict=tuple(kept))


def _seconds(found: Solution) -> float:
    return found.seconds


class Retry(NamedTuple):
    """A way to improve on a solution.

    `searches`: the words for its searches in the report. `improve`: takes the task, the best solution until now, and
    a function that solves another task with the retries before this one; returns a solution that is no worse.
    `is_needed`: also where enough has been priced (`Task.ends`).
    """

    searches: str
    improve: Callable[[Task, Solution, Callable[[Task], Solution]], Solution]
    is_needed: bool = False


RETRIES = (
    Retry("with heads that ranks share", cut_shared_heads),
    Retry("with simpler ops", write_simpler_ops),
    Retry("without the plan", ignore_plan),
    Retry("to fit the memory", fit_memory, is_needed=True),
    Retry("in other forms", take_forms),
    Retry("to find a conflict", find_conflict, is_needed=True),
)
PLACING = RETRIES[:3]  # the cheapest placements, whatever a rank holds


def solve(task: Task, retries: Sequence[Retry] = RETRIES) -> Solution:
    """Find the cheapest placements of all values of programs that share their leaves.

    Returns:
        A solution with infinite seconds where the task has none (`refuse_unplaced` raises the error).

    Raises:
        UnsupportedError: as `search`.
    """
    before, best = task.tally.searches, search(task)
    counts = {"as planned": 1}
    for at, retry in enumerate(retries):
        is_needed = retry.is_needed or best.lacks_memory or math.isinf(best.seconds)
        if not is_needed and task.ends():
            continue
        done = task.tally.searches
        best = retry.improve(task, best, partial(solve, retries=retries[:at]))
        counts[retry.searches] = task.tally.searches - done
    assert sum(counts.values()) == task.tally.searches - before
    return replace(best, searches={words: count for words, count in counts.items() if count})
