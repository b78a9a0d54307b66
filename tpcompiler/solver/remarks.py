"""Notes on a search: how long a call takes, how long with the weights placed for it alone, or with more of them cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

from tpcompiler.cost.objective import Objective
from tpcompiler.cost.timeline import StepTime, duration
from tpcompiler.ir.local import no_new_guards
from tpcompiler.ir.program import Note, PlannedProgram
from tpcompiler.solver.place import Aim
from tpcompiler.solver.search import search
from tpcompiler.solver.solution import Solution
from tpcompiler.solver.step_time import collectives_of, measure_step_time
from tpcompiler.solver.uncut import Uncut, find_uncut

FEWEST = 'for the fewest bytes on a rank instead of the fastest call: --optimize memory (optimize="memory")'
NO_LATENCY = 'for the cuts that would pay without latencies: --machine ideal (machine="ideal")'


class Remarks:
    """Notes on a search without a plan, which take searches of their own: they are made when they are asked for."""

    def __init__(self, planned: Sequence[PlannedProgram], found: Solution, aim: Aim) -> None:
        """`planned`: the programs as the search was given them."""
        self.planned, self.found, self.aim = planned, found, aim

    def notes(self, at: int, step: StepTime) -> Iterator[Note]:
        """The notes on one of the programs, a call of which takes so long."""
        yield Note("search", f"one call {step.text} on {self.aim.machine.name}")
        if len(self.planned) > 1:
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
        program, machine = self.planned[at], self.aim.machine
        with no_new_guards(program.graph):
            alone = search([program], Objective.of(machine), True, self.aim.gathers)
            both = alone, replace(self.found, programs=[self.found.programs[at]])
            there, here = (measure_step_time(each, collectives_of(each), machine).total for each in both)
        return there - here
