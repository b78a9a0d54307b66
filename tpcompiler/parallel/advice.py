"""Advice on a plan, from searches that leave part of it open.

The cheapest change that does without a gather, or that an op can take; and the memory that a searched plan would save,
if the plan leaves many weights whole without naming them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import fx

from tpcompiler.artifact.summary import SearchedPlan
from tpcompiler.cost.collective import KINDS
from tpcompiler.cost.machine import Machine
from tpcompiler.cost.objective import Objective, local_bytes
from tpcompiler.cost.path import steps_between
from tpcompiler.errors import ShardingError, TpCompilerError
from tpcompiler.ir import edit
from tpcompiler.ir.local import no_new_guards
from tpcompiler.ir.names import modules_around
from tpcompiler.ir.node_placement import Reshard, placement_of, reshard_of
from tpcompiler.ir.program import PIN, PlacedProgram, PlannedProgram, relax, reshard, tied
from tpcompiler.ir.sharding import Sharding
from tpcompiler.parallel.conversion import UNSEEN, Conversion
from tpcompiler.parallel.pipeline import find_placements
from tpcompiler.passes.place import place
from tpcompiler.plan.plan import Plan, PlanEntry
from tpcompiler.plan.styles import STYLES, read_style
from tpcompiler.runtime.records import Goal
from tpcompiler.solver.estimate import measure_leaves, measure_step_time
from tpcompiler.solver.search import PLACING, solve
from tpcompiler.solver.solution import Solution
from tpcompiler.solver.task import Task
from tpcompiler.terminal.printed import format_bytes

MOST_CHANGED = 2  # entries that one advice changes
MOST_WHOLE = 0.25  # of all bytes, that a plan may leave whole without naming them
LEAST_SAVED = 0.1  # of all bytes, that a rank holds less by a plan worth mentioning


class Advice(NamedTuple):
    """A change of the plan in words, and the program that it gives."""

    text: str
    made: PlacedProgram


@dataclass
class Adviser:
    """`planned` applies another plan to a program and leaves those that share its weights as they are."""

    plan: Plan
    planned: Callable[[Plan], Sequence[PlannedProgram]]
    at: int  # which of them the program is
    objective: Objective
    known: dict[Any, Advice | None] = field(default_factory=dict)

    def advise_error(self, error: ShardingError) -> ShardingError:
        """Return the error with the cheapest change of the plan that avoids it as its help, or unchanged."""
        found = self._styled(error.leaves) or self._best(_concerning(self.plan, error.leaves))
        if found is None:
            return error
        said = f"{found.text} ({format_bytes(self._sent(found.made))} sent per rank and call)"
        degree, _, other = error.help.partition(", or ")
        facts = {name.replace(" ", "_"): text for name, text in error.facts.items()}
        return ShardingError(error.message, help=f"{degree}, or {said}" if other else said, **facts)

    def advise_gather(self, value: str, program: PlacedProgram) -> str:
        """The change that leaves out the fallback gathers of a value and saves most, in words, or nothing."""
        now = self._sent(program)
        behind = _planned_behind(program, value)
        nearest, near = (_concerning(self.plan, leaves) for leaves in (behind[:1], behind))
        far = _concerning(self.plan, _planned_behind(program, value, far=True))
        tried = (self._best(nearest, alone=True), self._best(near), self._best(far)) if near else ()
        found = [
            advice
            for advice in tried
            if advice is not None and value not in _gathered(advice.made, self.objective.machine)
        ]
        best = min(found, key=lambda advice: self._sent(advice.made), default=None)
        if best is None or self._sent(best.made) >= now:
            return ""
        more = _held_bytes(best.made) - _held_bytes(program)
        price = f"; each rank holds {format_bytes(more)} more" if more > 0 else ""
        return f"{best.text} (each rank sends {format_bytes(now - self._sent(best.made))} less per call{price})"

    def _sent(self, program: PlacedProgram) -> int:
        return _wire_bytes(program, self.objective.machine)

    def _styled(self, leaves: Sequence[str]) -> Advice | None:
        """The style that cuts the dim that a placement does, but where the uses allow it, such as in whole groups."""
        for entry in _concerning(self.plan, leaves):
            for style in ("colwise", "rowwise") if entry.style.placement is not None else ():
                with contextlib.suppress(TpCompilerError):
                    now, other = self.planned(self.plan), self.planned(_changed(self.plan, {entry: style}))
                    if [_asked_dims(each, entry) for each in now] != [_asked_dims(each, entry) for each in other]:
                        continue
                    with no_new_guards(*(program.graph for program in other)):
                        if found := self._restyled(entry, style, other, leaves):
                            return found
        return None

    def _restyled(
        self, entry: PlanEntry, style: str, other: Sequence[PlannedProgram], leaves: Sequence[str]
    ) -> Advice | None:
        solution = solve(Task(other, self.objective), PLACING)
        if math.isinf(solution.seconds):
            return None
        program = solution.programs[self.at]
        node, fqn = next((node, fqn) for node, fqn in program.leaves() if fqn in leaves)
        levels = [level for dim in solution.leaves[node].dims for level in dim.levels]
        how = f"'{fqn}' as {solution.leaves[node].text(other[0].mesh)}"
        for level in levels:
            how = f"whole groups of {level.unit}" if level.unit > 1 else how
            how = f"each of its groups of {level.block} by itself" if level.block else how
        said = f"change '{entry.pattern}' from {entry.style.to_data()} to {style}, which cuts {how}"
        return Advice(said, place(program, solution))

    def _best(self, entries: tuple[PlanEntry, ...], alone: bool = False) -> Advice | None:
        """Return the search's change of these entries, as compiled, if it can be named in a few words.

        A byte of weights counts as one that is sent, for layers that are whole send nothing; not at all if `alone`.
        """
        if (known := (entries, alone)) not in self.known:
            try:
                with no_new_guards(*(program.graph for program in self.planned(self.plan))):
                    self.known[known] = self._sought(*known)
            except TpCompilerError:
                self.known[known] = None
        return self.known[known]

    def _sought(self, entries: Sequence[PlanEntry], alone: bool) -> Advice | None:
        now, other = self.planned(self.plan), self._otherwise(entries)
        opened = [_opened(*both, entries) for both in zip(now, other, strict=True)]
        machine = self.objective.machine
        found = solve(Task(opened, Objective.of(machine, None if alone else 1 / machine.bandwidth)), PLACING)
        if math.isinf(found.seconds):
            return None
        then = {fqn: _cut_dims(found.leaves[node]) for program in found.programs for node, fqn in program.leaves()}
        styles, pins = dict[PlanEntry, str](), dict[str, PlanEntry]()
        for entry in entries:
            changed = {
                fqn: edit.ndim(node)
                for program in now
                for node, fqn in program.leaves()
                if (own := program.fixed(node)) and own.asked_by == entry.where
                if _cut_dims(own.sharding) != then[fqn]
            }
            if entry.style.cut is not None and any(ndim > 1 for ndim in changed.values()):
                styles[entry] = _opposite(entry) if any(then[fqn] for fqn in changed) else "replicate"
            else:
                pins |= {_named(entry, fqn): entry for fqn in changed}
        if not 0 < len(styles) + len(pins) <= MOST_CHANGED:
            return None
        words = " and ".join(f"'{e.pattern}' from {e.style.name} to {style}" for e, style in styles.items())
        said = [*([f"change {words}"] if words else []), *(f"pin '{name}' to R" for name in pins)]
        solution = solve(Task(self.planned(_changed(self.plan, styles, pins)), self.objective), PLACING)
        if math.isinf(solution.seconds):
            return None
        return Advice(" and ".join(said), place(solution.programs[self.at], solution))

    def _otherwise(self, entries: Sequence[PlanEntry]) -> Sequence[PlannedProgram]:
        """The programs with the other cut of each layer that these entries name, or where it has none, without them."""
        cutting = {entry: _opposite(entry) for entry in entries if entry.style.cut is not None}
        nothing: dict[PlanEntry, str | None] = dict.fromkeys(entries)
        try:
            return self.planned(_changed(self.plan, nothing | cutting))
        except TpCompilerError:
            return self.planned(_changed(self.plan, nothing))


def _opened(now: PlannedProgram, other: PlannedProgram, entries: Sequence[PlanEntry]) -> PlannedProgram:
    """The program with every leaf that these entries name cut as they say, or otherwise, or whole."""
    asked = {entry.where for entry in entries}
    constraints = dict(relax(other, lambda own: own.asked_by in asked).constraints)
    for name, own in now.planned.items():
        if own.asked_by in asked:
            cut = [other.planned[name].sharding] if name in other.planned else []
            constraints[name] = own.widened((*cut, Sharding.replicated(own.sharding.ndim)))
    return replace(other, constraints=constraints)


def _cut_dims(sharding: Sharding) -> list[int]:
    """Also of one that is pending, which counts as cut."""
    return [dim for dim, cut in enumerate(sharding.dims) if cut.axes] + [-1] * bool(sharding.partial)


def _asked_dims(program: PlannedProgram, entry: PlanEntry) -> dict[str, list[int]]:
    """Return the dims that an entry shards, by leaf."""
    cut = {name: _cut_dims(own.sharding) for name, own in program.planned.items() if own.asked_by == entry.where}
    return {name: dims for name, dims in cut.items() if dims}


def _named(entry: PlanEntry, fqn: str) -> str:
    """Return the name in a plan for a leaf, among all that the entry matches."""
    return entry.pattern if entry.matches(fqn) else f"{entry.pattern}.{fqn.rpartition('.')[2]}"


def _changed(
    plan: Plan, styles: Mapping[PlanEntry, str | None], pins: Mapping[str, PlanEntry] = MappingProxyType({})
) -> Plan:
    """The plan with other styles for these entries, or without them, and with these leaves whole."""
    kept = [entry for entry in plan.entries if entry not in styles and entry.pattern not in pins]
    changed = [PlanEntry(entry.pattern, STYLES[style], entry.where) for entry, style in styles.items() if style]
    whole = [PlanEntry(name, read_style("R", where=entry.where), entry.where) for name, entry in pins.items()]
    return replace(plan, entries=(*kept, *changed, *whole))


def _opposite(entry: PlanEntry) -> str:
    return "rowwise" if entry.style.cut == "out" else "colwise"


def _concerning(plan: Plan, leaves: Iterable[str]) -> tuple[PlanEntry, ...]:
    """The entries that name these leaves, or modules around them, in order."""
    parts = [leaf.split(".") for leaf in leaves]
    names = {".".join(each[:count]) for each in parts for count in range(1, len(each) + 1)}
    return tuple(entry for entry in plan.entries if any(entry.matches(name) for name in names))


def _wire_bytes(program: PlacedProgram, machine: Machine) -> int:
    """Return the wire bytes of one call; a change that several uses share counts once."""
    return sum({(value, change.target): sent for value, change, sent in _changes(program, machine)}.values())


def _held_bytes(program: PlacedProgram) -> int:
    """Return the weight bytes of the first rank."""
    leaves = (node for node, _ in program.leaves())
    return sum(local_bytes(edit.fake(node), placement_of(node).shardings[0], program.mesh) for node in leaves)


def _planned_behind(program: PlacedProgram, value: str, far: bool = False) -> list[str]:
    """The leaves that the plan cut and because of which the value is cut, nearest first; far: all that it comes of."""
    names = dict(program.leaves())
    queue = [node for node in program.graph.nodes if node.name == value and node.target is not reshard]
    seen: dict[fx.Node, None] = {}
    for node in queue:  # it grows
        if node not in seen and (far or not placement_of(node).shardings[0].is_replicated):
            seen[node] = None
            queue += map(_value_behind, edit.operands(node))
    return [names[node] for node in seen if node in names and placement_of(node).reason.startswith("plan: ")]


def _gathered(program: PlacedProgram, machine: Machine) -> set[str]:
    return {value.name for value, change, _ in _changes(program, machine) if change.why == "fallback"}


def _changes(program: PlacedProgram, machine: Machine) -> Iterator[tuple[fx.Node, Reshard, int]]:
    """Yield each changed value of one call, its change, and the wire bytes per rank, if there are any.

    Once for each use of a value.
    """
    for node in edit.calls(program.graph):
        if node.target is reshard:
            (operand,), change = edit.operands(node), reshard_of(node)
            value, ends = edit.fake(operand), (change.source, change.target)
            steps = steps_between(*ends, value.shape, value.element_size(), program.mesh, machine)
            if sent := sum(step.wire_bytes for step in steps):
                yield _value_behind(operand), change, sent


def _value_behind(node: fx.Node) -> fx.Node:
    """Return the value that reshards have changed up to here, except for what a pin has asked for."""
    while node.target is reshard and PIN not in node.meta:
        (node,) = edit.operands(node)
    return node


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
    free = [replace(own, plan=Plan().with_search(), after=UNSEEN) for own in conversions]
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
