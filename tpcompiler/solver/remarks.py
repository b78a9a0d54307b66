"""Notes on a search: how long a call takes, how long with the weights placed for it alone, or with more of them cut."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from tpcompiler.cost.objective import Objective
from tpcompiler.cost.timeline import StepTime, duration
from tpcompiler.ir.local import no_new_guards
from tpcompiler.ir.program import Note, PlannedProgram
from tpcompiler.solver.drive import PLACING, solve
from tpcompiler.solver.memory import measure_memory
from tpcompiler.solver.solution import Solution
from tpcompiler.solver.step_time import measure_step_time
from tpcompiler.solver.task import Aim, Task
from tpcompiler.solver.uncut import Uncut, find_uncut

FEWEST = 'for the fewest bytes on a rank instead of the fastest call: --optimize memory (optimize="memory")'
NO_LATENCY = 'for the cuts that would pay without latencies: --machine ideal (machine="ideal")'


def note_search(task: Task, found: Solution) -> list[str]:
    """Report how good a solution is, and what was given up for it."""
    notes = []
    if task.is_searched:
        proof = f"at most {math.ceil(found.above * 1e3) / 1e3:.1%} above the least" if found.above else "the least"
        call = "that" if len(found.programs) == 1 else "that, with a call of each other program,"
        notes.append(f"{call} is {proof} of all choices that were compared{_order_text(found)}")
        notes += _unsearched(task, found)
    if task.is_searched or task.limit is not None:
        notes.append(f"a rank holds about {measure_memory(found).text}")
    if found.simpler:
        names = ", ".join(name for _, name in sorted(found.simpler))
        notes.append(f"replaced by simpler ops, because a dim that they need whole is cut: {names}")
    if found.capped:
        notes.append(f"{found.capped} ops and values have too many choices: the search compared only some of each")
    return [*notes, *found.declined]


def count_searches(searches: Mapping[str, int]) -> str:
    """Report the number of searches, and the reason for each but the first: `searched 3 times (2 with simpler ops)`."""
    total, (first, *_) = sum(searches.values()), searches
    more = ", ".join(f"{count} {words}" for words, count in searches.items() if words != first)
    return f"searched {'once' if total == 1 else f'{total} times'}{f' ({more})' if more else ''}"


def with_notes(program: PlannedProgram, notes: Sequence[str]) -> PlannedProgram:
    """Return a placed program with notes on the search; without a plan a layer may well stay untouched."""
    kept = (note for note in program.notes if not (program.is_searched and note.kind == "untouched"))
    return replace(program, notes=(*kept, *(Note("search", text) for text in notes)))


def _order_text(found: Solution) -> str:
    """Return the order in which several axes were solved; empty for one axis."""
    if len(found.turns) > 1:
        return f", one axis after the other: {', then '.join(axis for (axis,) in found.turns)}"
    axes = found.turns[0] if found.turns else ()
    return f", over {' and '.join(axes)} at once" if len(axes) > 1 else ""


def _unsearched(task: Task, found: Solution) -> Iterator[str]:
    """Yield a note on the axes over which no choice was compared."""
    searched = {axis for turn in found.turns for axis in turn} | {*found.model}
    if axes := [axis for axis, degree in task.programs[0].mesh.axes if degree > 1 and axis not in searched]:
        yield f"over {' and '.join(axes)} nothing was compared: no input is placed there, so these ranks do equal work"


class Remarks:
    """Notes on a search without a plan. They take more searches, so they are written on request."""

    def __init__(self, found: Solution, aim: Aim) -> None:
        self.found, self.aim = found, aim

    def notes(self, at: int, step: StepTime) -> Iterator[Note]:
        """The notes on one of the programs, a call of which takes so long."""
        yield Note("search", f"one call {step.text} on {self.aim.machine.name}")
        if len(self.found.given) > 1:
            alone = duration(max(0.0, step.total + self._gained_alone(at)))
            yield Note("search", f"placed alone, a call of this program would take {alone}")
        if self.aim.optimize == "latency" and self._uncut:
            yield from (Note("uncut", each.text(at)) for each in self._uncut)
            yield Note("uncut", FEWEST)
            yield from [] if self.aim.machine.name == "ideal" else [Note("uncut", NO_LATENCY)]

    @cached_property
    def _uncut(self) -> list[Uncut]:
        with no_new_guards(*(program.graph for program in self.found.programs)):
            return find_uncut(self.found, self.aim.objective)

    def _gained_alone(self, at: int) -> float:
        """Seconds that a call of a program takes more, or less, where the weights are placed for it alone."""
        program, machine = self.found.given[at], self.aim.machine
        with no_new_guards(program.graph):
            alone = solve(Task([program], Objective.of(machine)), PLACING)
            both = alone, replace(self.found, programs=[self.found.programs[at]])
            there, here = (measure_step_time(each, machine).total for each in both)
        return there - here
