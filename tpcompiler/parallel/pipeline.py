"""The passes in order, for one program or for several that share their weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import tpcompiler.rules  # noqa: F401  (registers the rules)
from tpcompiler.cost.objective import LEAST, Objective
from tpcompiler.ir.local import no_new_guards
from tpcompiler.ir.program import PlacedProgram, PlannedProgram
from tpcompiler.parallel.conversion import UNSEEN, Conversion, Dump
from tpcompiler.parallel.partition import Partition
from tpcompiler.passes._rewrite_candidates import find_forms, note_forms
from tpcompiler.passes.apply_plan import apply_plan, names_of
from tpcompiler.passes.choose_paths import choose_paths
from tpcompiler.passes.divide_sizes import divide_sizes
from tpcompiler.passes.flatten_branches import flatten_branches
from tpcompiler.passes.fold_reshards import fold_reshards
from tpcompiler.passes.place import place
from tpcompiler.passes.regions.attend_in_turns import attend_in_turns
from tpcompiler.passes.regions.dispatch_experts import dispatch_experts
from tpcompiler.passes.regions.group_queries import group_queries
from tpcompiler.passes.regions.join_branches import join_branches
from tpcompiler.passes.regions.spread_experts import spread_experts
from tpcompiler.plan.plan import Plan
from tpcompiler.solver.estimate import measure_leaves, measure_state
from tpcompiler.solver.report import note_search, refuse_unplaced, with_notes
from tpcompiler.solver.search import solve
from tpcompiler.solver.solution import Solution
from tpcompiler.solver.task import Forms, Styles, Task


def find_placements(conversions: Sequence[Conversion], *, forms: bool = True) -> Solution:
    """Plan programs that are converted together, and find the best placements of all their values.

    Args:
        forms: without a plan, also try other forms of the programs (`passes/_rewrite_candidates.py`).

    Raises:
        TooLarge, ShardingError: as `refuse_unplaced`.
    """
    task = make_task(conversions, forms=forms)
    found = solve_task(task)
    forms_of_plan = {entry.where for own in conversions for entry in own.plan.forms.as_found().entries}
    notes = note_search(task, found, forms_of_plan)
    if task.forms is not None:
        formed = [own.with_styles(*found.forms) for own in conversions]
        plans, names = [own.completed(found) for own in formed], [names_of(own.program) for own in formed]
        notes += note_forms(task, found, plans, names, partial(plan_programs, conversions))
    return replace(found, programs=[with_notes(program, notes) for program in found.programs])


def objective_of(conversions: Sequence[Conversion]) -> Objective:
    """Return what a search for programs that are converted together makes least."""
    first, calls = conversions[0], [own.asked.calls for own in conversions]
    share = sum(calls) / len(calls)
    price = LEAST if first.asked.optimize == "memory" else None
    return Objective.of(first.machine, price, tuple(own / share for own in calls), first.asked.optimizer)


def make_task(conversions: Sequence[Conversion], *, forms: bool = True) -> Task:
    """Plan programs that are converted together, for a search; `forms` as in `find_placements`."""
    planned = [plan_program(own, own.plan, own.after) for own in conversions]
    first, tried = conversions[0], None
    if forms and first.plan.searches and not first.plan.gathers:
        tried = Forms(find_forms(first.device), partial(_plan_in_forms, conversions))
    return Task(planned, objective_of(conversions), limit=first.asked.memory, forms=tried)


def solve_task(task: Task) -> Solution:
    """Find the best placements.

    Raises:
        TooLarge, ShardingError: as `refuse_unplaced`.
    """
    with no_new_guards(*(program.graph for program in task.programs)):
        found = solve(task)
    refuse_unplaced(task, found)
    return found


def plan_program(own: Conversion, plan: Plan, after: Dump = UNSEEN) -> PlannedProgram:
    """Run the passes before the search."""
    plan = plan.as_found() if plan.searches else plan
    with no_new_guards(own.program.graph):
        flat = flatten_branches(own.program, plan, own.mesh)
        if flat is not own.program:
            flat = after(flat, "flatten_branches")
        planned = after(apply_plan(flat, plan, own.mesh, *own.boundary), "apply_plan")
        planned = replace(planned, notes=(*planned.notes, *own.dropped))
        joined = after(join_branches(planned), "join_branches")
        spread = after(spread_experts(joined), "spread_experts")
        divided = after(divide_sizes(spread, own.device), "divide_sizes")
        dispatched = after(dispatch_experts(divided), "dispatch_experts")
        in_turns = after(attend_in_turns(dispatched, own.device), "attend_in_turns")
        return in_turns if own.asked.keep_repeats else after(group_queries(in_turns, own.device), "group_queries")


def plan_programs(conversions: Sequence[Conversion], plans: Sequence[Plan]) -> list[PlannedProgram]:
    """Plan programs, each by another plan."""
    return [plan_program(own, plan) for own, plan in zip(conversions, plans, strict=True)]


def _plan_in_forms(conversions: Sequence[Conversion], forms: Sequence[Styles]) -> list[PlannedProgram]:
    """Plan programs with the styles of other forms, as `Forms.plan`."""
    formed, before = ([own.with_styles(*some) for own in conversions] for some in (forms, forms[:-1]))
    if all(own.plan == other.plan for own, other in zip(formed, before, strict=True)):
        return []
    return [plan_program(own, own.plan, own.after) for own in formed]


def place_programs(conversions: Sequence[Conversion], found: Solution) -> list[PlacedProgram]:
    """Put the placements and the changes of sharding into the programs."""
    with no_new_guards(*(program.graph for program in found.programs)):
        return [
            own.after(place(program, found, check_indices=own.asked.check_indices), "place")
            for own, program in zip(conversions, found.programs, strict=True)
        ]


def partition_program(own: Conversion, placed: PlacedProgram, found: Solution) -> Partition:
    """Run the passes after the search, up to the program for all ranks (`partition.py` runs those for each rank)."""
    with no_new_guards(placed.graph):
        folded = own.after(fold_reshards(placed), "fold_reshards")
        routed = own.after(choose_paths(folded, own.machine), "choose_paths")
    limit = own.asked.memory
    room = None if limit is None else limit - sum(measure_leaves(found).values()) - measure_state(found)
    partition = Partition(routed, own.device, own.asked.collectives, own.machine, room)
    own.after(partition.local_program(0), "lowered_rank_0")
    return partition
