"""Weights that a plan leaves whole without naming them, and what a rank would hold by the plan of the search."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from tpcompiler.artifact.summary import SearchedPlan
from tpcompiler.cost.collective import KINDS
from tpcompiler.errors import TpCompilerError
from tpcompiler.ir import edit
from tpcompiler.ir.names import modules_around
from tpcompiler.ir.program import PlannedProgram, tied
from tpcompiler.parallel.conversion import Conversion, unseen
from tpcompiler.parallel.pipeline import find_placements
from tpcompiler.plan.plan import Plan
from tpcompiler.runtime.records import Goal
from tpcompiler.solver.estimate import measure_leaves, measure_step_time
from tpcompiler.solver.solution import Solution

MOST_WHOLE = 0.25  # of all bytes, that a plan may leave whole without naming them
LEAST_SAVED = 0.1  # of all bytes, that a rank holds less by a plan worth mentioning


def find_searched_plan(conversions: Sequence[Conversion], found: Solution) -> SearchedPlan | None:
    """Search for a plan if the given one leaves much whole; return what it holds if that is clearly less.

    For the caller's goal, and if the fastest call needs nearly as many bytes, for the fewest bytes.
    """
    sizes, whole = dict[str, int](), set[str]()
    for own, program in zip(conversions, found.programs, strict=True):
        first_of = tied(program)
        for node, fqn in program.leaves():
            if first_of[node.name] == node.name:
                value = edit.fake(node)
                sizes[fqn] = value.numel() * value.element_size()
                if program.at_rest(node, found.leaves[node]).is_replicated and not _is_named(
                    program, node, fqn, own.plan
                ):
                    whole.add(fqn)
    total, left = sum(sizes.values()), sum(map(sizes.__getitem__, whole))
    if found.mesh.world_size == 1 or any(own.plan.searches for own in conversions) or left <= MOST_WHOLE * total:
        return None
    held = sum(measure_leaves(found).values())
    free = [replace(own, plan=Plan().with_search(), after=unseen) for own in conversions]
    asked = conversions[0].asked
    limit = conversions[0].machine.usable_memory if asked.memory is None else asked.memory
    goals: Sequence[Goal] = (asked.optimize, "memory") if _could_be_faster(found) else ("memory",)
    for goal in dict.fromkeys(goals):
        with contextlib.suppress(TpCompilerError):
            other = find_placements([own.with_asked(memory=limit, optimize=goal) for own in free])
            searched = sum(measure_leaves(other).values())
            if held - searched >= LEAST_SAVED * total:
                return SearchedPlan(
                    bytes=total, held_bytes=held, whole_bytes=left, searched_bytes=searched, optimize=goal
                )
    return None


def _is_named(program: PlannedProgram, leaf: fx.Node, fqn: str, plan: Plan) -> bool:
    """Return True if an entry of the plan makes a leaf whole: its own, its layer's, or that of a module around it."""
    own = program.constraints.get(leaf.name)
    if own is not None and own.request is not None and own.sharding.is_replicated:
        return True
    return any(entry.style.whole and any(map(entry.matches, modules_around(fqn))) for entry in plan.entries)


def _could_be_faster(found: Solution) -> bool:
    """Return False if all work of a call takes less time than any collective: its fastest placements are whole."""
    mesh, machine = found.mesh, found.machine
    axes = [axis for axis in mesh.names if mesh.degree(axis) > 1]
    least = min(machine.collective_seconds(kind, (axis,), 0, mesh) for kind in KINDS for axis in axes)
    return (mesh.world_size - 1) * measure_step_time(found, machine).work > least
