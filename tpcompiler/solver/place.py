"""The cheapest placements on a machine, of those that fit a rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from tpcompiler.cost.machine import Machine
from tpcompiler.cost.machine_file import read_machine
from tpcompiler.cost.objective import LEAST, Objective
from tpcompiler.errors import ShardingError
from tpcompiler.ir.dim_sharding import DimSharding
from tpcompiler.ir.program import Note, PlannedProgram, Seed
from tpcompiler.ir.sharding import Sharding
from tpcompiler.solver.memory import Memory, measure_memory
from tpcompiler.solver.search import search
from tpcompiler.solver.solution import Solution
from tpcompiler.solver.stage import Known
from tpcompiler.terminal.printed import format_bytes
from tpcompiler.terminal.progress import counted

MOST_TRIALS = 12  # searches for placements that fit
STEPS = 16.0  # by which the price of a byte grows until they do
MOST_ENTRIES = 32  # of a plan that are left out in turn to find those that conflict


class TooLarge(ShardingError):
    """No placement that was found fits a rank. `least`: what the smallest of them holds; `found`: the fastest."""

    least: Memory
    found: Solution


Goal = Literal["latency", "memory"]


@dataclass(frozen=True)
class Aim:
    """What placements are to be good for.

    Attributes:
        machine: where a call is to be fast.
        limit: the most bytes that a rank may hold.
        gathers: without a plan, weights may be gathered and the batch may be cut.
        optimize: the fastest call, or the fewest bytes of weights on a rank and then the fastest call.
        calls: of several programs, how often each is called, or nothing: all as often.
        forms: without a plan, other forms of the programs are tried where they may pay (`passes/_forms.py`).
    """

    machine: Machine = field(default_factory=read_machine)
    limit: int | None = None
    gathers: bool = False
    optimize: Goal = "latency"
    calls: tuple[float, ...] = ()
    forms: bool = True

    @property
    def objective(self) -> Objective:
        """With the weights of calls so that they are as many as the programs."""
        share = sum(self.calls) / max(1, len(self.calls))
        calls = tuple(own / share for own in self.calls)
        return Objective.of(self.machine, LEAST if self.optimize == "memory" else None, calls)


def place(
    programs: Sequence[PlannedProgram], auto: bool, aim: Aim, read: Known | None = None
) -> tuple[list[PlannedProgram], Solution]:
    """The cheapest placements of all values.

    Args:
        read: what searches for the same aim found before.

    Raises:
        ShardingError: none suits all that is asked for.
        TooLarge: none that is found fits a rank.
    """
    objective, read = aim.objective, Known() if read is None else read
    found = search(programs, objective, auto, aim.gathers, read)
    if math.isinf(found.seconds):
        raise _infeasible(programs, objective, aim, auto)
    above = found.above(found.bound)
    if aim.limit is not None:
        found, above = _fitted(programs, objective, aim, aim.limit, found, auto, read)
    said = []
    if auto:
        proof = f"at most {math.ceil(above * 1e3) / 1e3:.1%} above the least" if above else "the least"
        what = "that" if len(programs) == 1 else "that, with a call of each other program,"
        said.append(f"{what} is {proof} of all choices that were compared{_order_text(found)}")
    if auto or aim.limit is not None:
        said.append(f"a rank holds about {measure_memory(found).text}")
    if found.simpler:
        names = ", ".join(name for _, name in sorted(found.simpler))
        said.append(f"replaced by simpler ops, because a dim that they need whole is cut: {names}")
    if found.capped:
        said.append(f"{found.capped} ops and values have too many choices: the search compared only some of each")
    kept = [
        replace(
            program,
            notes=(
                *(note for note in program.notes if not (auto and note.kind == "untouched")),
                *(Note("search", text) for text in said),
            ),
        )
        for program in found.programs
    ]
    return kept, found


def _order_text(found: Solution) -> str:
    """In which order several axes were solved; of one axis nothing."""
    if len(found.turns) > 1:
        return f", one axis after the other: {', then '.join(axis for (axis,) in found.turns)}"
    axes = found.turns[0] if found.turns else ()
    return f", over {' and '.join(axes)} at once" if len(axes) > 1 else ""


def _infeasible(programs: Sequence[PlannedProgram], objective: Objective, aim: Aim, auto: bool) -> ShardingError:
    """The error that names the entries of the plan that cannot hold together: without any one of them, others can.

    By a deletion filter (Chinneck and Dravnieks, "Locating minimal infeasible constraint sets in linear programs",
    1991).
    """
    seeds = (seed for program in programs for own in (program.seeds, program.kept) for seed in own.values())
    entries = dict.fromkeys(seed.asked_by for seed in seeds)
    kept = list(entries)
    for entry in counted(kept[:MOST_ENTRIES], "looking for what conflicts", "entries"):
        rest = [each for each in kept if each != entry]
        fewer = [program.without(entries.keys() - rest) for program in programs]
        if math.isinf(search(fewer, objective, auto, aim.gathers).seconds):
            kept = rest
    return ShardingError(
        "no placement of all values suits what is asked for",
        help="pin less in the plan and at the boundary, or use a degree that divides more of the sizes",
        asked_by=" and ".join(kept),
    )


def _fitted(
    programs: Sequence[PlannedProgram],
    objective: Objective,
    aim: Aim,
    limit: int,
    found: Solution,
    auto: bool,
    read: Known,
) -> tuple[Solution, float]:
    """Placements that hold no more than `limit` bytes, and by what share they may be above the cheapest of those.

    By a price on the bytes of weights that is raised until they fit (Everett, "Generalized Lagrange multiplier method",
    1963). What is sought at each price bounds the cheapest from below.
    """
    least = measure_memory(found)
    if least.total <= limit:
        return found, found.above(found.bound)
    bound, low, high, times = found.bound, 1.0, math.inf, STEPS
    best: Solution | None = None
    for _ in counted(range(MOST_TRIALS if auto else 0), "making it fit", "searches"):
        trial = search(programs, objective._replace(held=objective.held * times), auto, aim.gathers, read)
        memory, more = measure_memory(trial), times - 1
        room = limit - memory.total + memory.floats  # for weights
        bound = max(bound, trial.bound - more * objective.held_seconds(room))
        seconds = trial.seconds - more * objective.held_seconds(memory.floats)
        least = min(least, memory, key=lambda each: each.total)
        if memory.total > limit:
            low = times
        else:
            high = times
            if best is None or seconds < best.seconds:
                best = replace(trial, seconds=seconds)
        times = times * STEPS if math.isinf(high) else math.sqrt(low * high)
    if best is None:
        leaves = ", ".join(f"'{fqn}' {format_bytes(count)}" for fqn, count in least.largest)
        error = TooLarge(
            f"a rank would hold {least.text}; that is {format_bytes(least.total - limit)} more than the limit of "
            f"{format_bytes(limit)}. The largest weights there are {leaves}",
            help=f"use more ranks{'' if auto else ', cut more layers'}, or a limit of at least {least.total} bytes",
        )
        error.least, error.found = least, found
        raise error
    if auto:  # at its own price, what these layers are best beside
        settled = search([_keeping(program, best) for program in programs], objective, auto, aim.gathers, read)
        best = settled if measure_memory(settled).total <= limit else best
    return replace(best, is_tight=True), best.above(bound)


def _keeping(program: PlannedProgram, found: Solution) -> PlannedProgram:
    """The program with its layers as they were found, where in its dim each is cut left open."""
    axis, kept = program.mesh.model_axis, dict(program.kept)
    for node, fqn in program.leaves():
        if (layer := found.layers.get(fqn)) is not None:
            dims = list(Sharding.replicated(node.meta["val"].ndim).dims)
            if layer.dim is not None:
                dims[layer.dim] = DimSharding.by(axis)
            kept.setdefault(node.name, Seed(Sharding(tuple(dims)), "the search", loose=True))
    return replace(program, kept=kept)
