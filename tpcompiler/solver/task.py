"""The input of a search: programs, prices, and freedom."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

from tpcompiler.cost.machine import Machine
from tpcompiler.cost.machine_file import read_machine
from tpcompiler.cost.objective import LEAST, Objective
from tpcompiler.errors import InputsError, option
from tpcompiler.ir.program import PlannedProgram
from tpcompiler.runtime.records import Optimizer
from tpcompiler.solver.problem import Problem
from tpcompiler.solver.solution import Solution, Turns
from tpcompiler.solver.turn import Memo

MOST_PRICES = 1_000_000  # from which nothing better is looked for: a minute or so
Goal = Literal["latency", "memory"]
# Variables of a problem, and which of its values each may take.
Fixed = Callable[[Problem], Iterable[tuple[int, Sequence[bool]]]]
Styles = Mapping[str, str]  # of layers, by name
Finder = Callable[[Solution], Iterable[tuple[str, str]]]  # of layers for which a form could pay, with its style


@dataclass(frozen=True)
class Aim:
    """The goal of a conversion: which placements are best, and which are allowed.

    Attributes:
        machine: where a call is to be fast.
        limit: the most bytes that a rank may hold.
        optimize: the fastest call, or the fewest bytes of weights on a rank and then the fastest call.
        calls: how often each of several programs is called; all equally often if empty.
        forms: without a plan, other forms of the programs are tried (`passes/_rewrite_candidates.py`).
        optimizer: whose state ranks hold next to parameters with gradients.
    """

    machine: Machine = field(default_factory=read_machine)
    limit: int | None = None
    optimize: Goal = "latency"
    calls: tuple[float, ...] = ()
    forms: bool = True
    optimizer: Optimizer = "adamw"

    def __post_init__(self) -> None:
        if self.optimize not in get_args(Goal):
            raise InputsError(
                f"{option('--optimize', 'optimize')} is {self.optimize!r}",
                help=f"name one of {', '.join(get_args(Goal))}",
            )

    @property
    def objective(self) -> Objective:
        """Return a copy with one call weight per program."""
        share = sum(self.calls) / max(1, len(self.calls))
        calls = tuple(own / share for own in self.calls)
        return Objective.of(self.machine, LEAST if self.optimize == "memory" else None, calls, self.optimizer)


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
