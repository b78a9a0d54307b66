"""The input of a search: programs, prices, and freedom."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tpcompiler.cost.objective import Objective
from tpcompiler.ir.memo import Memo
from tpcompiler.ir.program import PlannedProgram
from tpcompiler.solver.problem import Problem
from tpcompiler.solver.solution import Solution, Turns

MOST_PRICES = 1_000_000  # from which nothing better is looked for: a minute or so
# Variables of a problem, and which of its values each may take.
Fixed = Callable[[Problem], Iterable[tuple[int, Sequence[bool]]]]
Styles = Mapping[str, str]  # of layers, by name
Finder = Callable[[Solution], Iterable[tuple[str, str]]]  # of layers for which a form could pay, with its style


class Forms(NamedTuple):
    """Other forms of the programs, which styles ask for.

    Attributes:
        plan: plans the programs again with these styles too, one mapping after the other; empty if the last changes
            nothing.
    """

    finders: Sequence[Finder]
    plan: Callable[[Sequence[Styles]], Sequence[PlannedProgram]]


@dataclass
class Tally:
    """The work for a task and those made from it.

    Attributes:
        searches: their number.
        prices: cells of the tables of prices that they wrote.
        has_ended: True if better placements were not looked for, because enough had been priced.
    """

    searches: int = 0
    prices: int = 0
    has_ended: bool = False


@dataclass(frozen=True)
class Task:
    """Programs to place.

    Attributes:
        programs: they share their leaves.
        known: results of earlier searches on the same machine.
        limit: the most bytes that a rank may hold.
        forms: other forms to try.
        model: the axes over which layers are cut; by default the mesh's.
        kept: problems that are solved many times, at other prices of a byte or with `fixed`.
        fixed: limits the values of some variables; then no weight is gathered at all.
        turns: the order of the axes; by default `model` one by one, then the others.
        tally: the work for this task and those made from it.
    """

    programs: Sequence[PlannedProgram]
    objective: Objective
    known: Memo = field(default_factory=Memo)
    limit: int | None = None
    forms: Forms | None = None
    model: tuple[str, ...] = ()
    kept: Memo | None = None
    fixed: Fixed | None = None
    turns: Turns = ()
    tally: Tally = field(default_factory=Tally)

    @property
    def is_searched(self) -> bool:
        """True if the search decides the styles of layers over the model's axes."""
        return self.programs[0].is_searched

    def ends(self) -> bool:
        """Return True, and note it, if so much has been priced that no better placements are looked for."""
        self.tally.has_ended = self.tally.has_ended or self.tally.prices > MOST_PRICES
        return self.tally.has_ended

    @property
    def model_axes(self) -> tuple[str, ...]:
        return self.model or (self.programs[0].mesh.model_axis,)
