"""The retries of the search: each takes the best solution until now, and searches again for a better one.

`again` solves another task with the retries that come earlier in the list (`drive.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from operator import attrgetter

from tpcompiler.cost.collective import KINDS
from tpcompiler.errors import TpCompilerError
from tpcompiler.ir import edit
from tpcompiler.ir.constraints import AnyStyle, Constraint, Dims
from tpcompiler.ir.dim_sharding import DimSharding
from tpcompiler.ir.local import no_new_guards
from tpcompiler.ir.program import PlannedProgram, relax
from tpcompiler.ir.sharding import Sharding
from tpcompiler.ir.split_axis import keeps_shares, on_split_axis
from tpcompiler.solver.memory import measure_memory
from tpcompiler.solver.pose import find_program_kernels
from tpcompiler.solver.search import search
from tpcompiler.solver.solution import Openings, Solution, join_places
from tpcompiler.solver.stage import Known
from tpcompiler.solver.step_time import sends_of
from tpcompiler.solver.task import Styles, Task
from tpcompiler.solver.variants import find_needed, write_variants
from tpcompiler.terminal.progress import counted

Again = Callable[[Task], Solution]
MOST_TRIALS = 12  # searches for placements that fit
STEPS = 16.0  # by which the price of a byte grows until they do
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
    openings, bodies = best.openings, Known()
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
    programs: Sequence[PlannedProgram], calls: Openings, bodies: Known
) -> list[tuple[PlannedProgram, dict[str, list[str]]]]:
    return [
        write_variants(program, {name: places for (at, name), places in calls.items() if at == own}, bodies)
        for own, program in enumerate(programs)
    ]


def ignore_plan(task: Task, best: Solution, again: Again) -> Solution:
    """Search without the plan for the simpler ops and the mesh that its layers may hide; then with it on these."""
    if not any(own.narrows for program in task.programs for own in program.planned.values()):
        return best
    rest = again(replace(task, programs=[relax(program, attrgetter("narrows")) for program in task.programs]))
    is_far = task.limit is not None and not math.isinf(rest.seconds) and measure_memory(rest).total > task.limit
    freed = math.inf if is_far else rest.seconds
    if (rest.simpler, rest.mesh) == (best.simpler, best.mesh):
        return replace(best, freed=freed)
    mesh = task.programs[0].mesh
    same = [program for program, _ in _written(task.programs, rest.simpler, Known())]
    for axis, (outer, *_) in rest.mesh.factors if rest.mesh != mesh else ():
        same = [on_split_axis(program, axis, outer) for program in same]
    own = replace(task, programs=same, model=rest.model)
    found = replace(search(own), simpler=rest.simpler)
    best = found if found.seconds == rest.seconds else min(best, found, key=_seconds)
    return replace(best, freed=freed)


def fit_memory(task: Task, best: Solution, again: Again) -> Solution:
    """Raise the price of the bytes of weights until a rank holds no more than the limit.

    See Everett, "Generalized Lagrange multiplier method", 1963. The optimum at each price bounds the cheapest
    placements that fit from below. Without any that fit, the result is the fastest, marked as too large.
    """
    if task.limit is None or math.isinf(best.seconds) or (least := measure_memory(best)).total <= task.limit:
        return best
    limit, objective = task.limit, task.objective
    low, high, times = 1.0, math.inf, STEPS
    bound = best.seconds if best.above == 0.0 else 0.0
    fitting: Solution | None = None
    for _ in counted(range(MOST_TRIALS if task.is_searched else 0), "making it fit", "searches"):
        trial = again(replace(task, objective=objective._replace(held=objective.held * times)))
        memory, more = measure_memory(trial), times - 1
        grown = memory.floats + memory.gradients + memory.state  # with weights
        room = (limit - memory.total + grown) * memory.floats / max(1, grown)  # for weights
        bound = max(bound, trial.seconds - more * objective.held_seconds(room)) if trial.above == 0.0 else bound
        seconds = trial.seconds - more * objective.held_seconds(memory.floats)
        least = min(least, memory, key=lambda each: each.total)
        if memory.total > limit:
            low = times
        else:
            high = times
            if fitting is None or seconds < fitting.seconds:
                fitting = replace(trial, seconds=seconds)
        times = times * STEPS if math.isinf(high) else math.sqrt(low * high)
    if fitting is None:
        return replace(best, too_large=least)
    # at its own price, the best of everything else next to these layers
    settled = again(replace(task, programs=[_keeping(program, fitting) for program in task.programs]))
    fitting = settled if measure_memory(settled).total <= limit else fitting
    return replace(fitting, is_tight=True, bound=bound, freed=None)


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
                if not found.rank < best.rank:  # a smaller problem, of which fewer choices may have been left out
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
