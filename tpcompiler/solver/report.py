"""Reports on a search: what it found and gave up, sizes that ranks do not divide, and errors where nothing is found."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from tpcompiler._torch import OpOverload, aten
from tpcompiler.cost.objective import LEAST, Objective
from tpcompiler.cost.timeline import StepTime, duration
from tpcompiler.errors import ShardingError
from tpcompiler.ir import edit
from tpcompiler.ir.constraints import AnyStyle
from tpcompiler.ir.dim_sharding import DimSharding
from tpcompiler.ir.leaf_values import computed_from_leaves
from tpcompiler.ir.local import no_new_guards
from tpcompiler.ir.names import fold_layers, layer_of
from tpcompiler.ir.program import Note, PlannedProgram
from tpcompiler.ir.text import op_name
from tpcompiler.solver.estimate import Memory, measure_memory, measure_step_time, sends_of
from tpcompiler.solver.search import PLACING, solve
from tpcompiler.solver.solution import Solution
from tpcompiler.solver.task import Task
from tpcompiler.solver.what_if import Uncut, find_uncut
from tpcompiler.terminal.printed import format_bytes


class TooLarge(ShardingError):
    """No placement that was found fits a rank. `least`: the memory of the smallest one; `searches`: by their kind."""

    least: Memory
    searches: Mapping[str, int]


def refuse_unplaced(task: Task, found: Solution) -> None:
    """Refuse a solution that places nothing, or more on a rank than it may hold.

    Raises:
        ShardingError: no placement suits all that is asked for; with the entries of the plan that conflict.
        TooLarge: none that was found fits a rank.
    """
    if math.isinf(found.seconds):
        raise ShardingError(
            "no placement of all values suits what is asked for",
            help="pin less in the plan and at the boundary, or use a degree that divides more of the sizes",
            asked_by=" and ".join(found.conflict),
        )
    if (least := found.too_large) is not None and (limit := task.limit) is not None:
        leaves = ", ".join(f"'{fqn}' {format_bytes(count)}" for fqn, count in least.largest)
        more = "" if task.is_searched else ", cut more layers"
        error = TooLarge(
            f"a rank would hold {least.text}; that is {format_bytes(least.total - limit)} more than the limit of "
            f"{format_bytes(limit)}. The largest weights there are {leaves}",
            help=f"use more ranks{more}, or a limit of at least {least.total} bytes",
        )
        error.least, error.searches = least, found.searches
        raise error


CASTS = (aten._to_copy.default, aten.clone.default)
KINDS = (
    "heads",
    "kv heads",
    "features of a packed block",
    "quantisation groups",
    "entries of the vocabulary",
    "features",
)


@dataclass(frozen=True)
class Obstacle:
    """So many of a kind that ranks deal out evenly, or not, and the layers that have them, `*` for repeated ones."""

    kind: str
    count: int
    layers: tuple[str, ...]

    def __str__(self) -> str:
        more = f" and {len(self.layers) - 1} more" if len(self.layers) > 1 else ""
        return f"{self.count:,} {self.kind} ({self.layers[0]}{more})"


def find_obstacles(found: Solution) -> list[Obstacle]:
    """Find the sizes that the search shards over the model's axis, in the order of `KINDS`."""
    heads = {each for program in found.programs for each in _heads(found, program)}
    most = {layer: max(count for count, other in heads if other == layer) for _, layer in heads}
    named = [(_kind_of_heads(count, most[layer]), count, layer) for count, layer in sorted(heads)]
    layers: dict[tuple[str, int], dict[str, None]] = {}
    for kind, count, layer in (*named, *(each for program in found.programs for each in _cuts(found, program))):
        if kind != "features" or not any(layer.startswith(f"{other}.") for other in most):  # as its heads say
            layers.setdefault((kind, count), {})[layer] = None
    made = (Obstacle(kind, count, tuple(names)) for (kind, count), names in layers.items())
    return sorted(made, key=lambda each: (KINDS.index(each.kind), each.count))


def _kind_of_heads(count: int, most: int) -> str:
    """Several heads of queries share one of keys and values, so a module has fewer of these."""
    return "kv heads" if count < most and most % count == 0 else "heads"


def _heads(found: Solution, program: PlannedProgram) -> Iterator[tuple[int, str]]:
    """A view of an activation that makes two dims of one that is cut: the outer one is heads."""
    weights = computed_from_leaves(program.graph, dict(program.leaves()).keys())
    for node in edit.calls(program.graph):
        choice = found.choices.get(node)
        if choice is None or node.target not in edit.VIEWS or node in weights:
            continue
        whole, made = edit.shape(edit.operands(node)[0]), edit.shape(node)
        outer = list(zip(made, made[1:], choice.made[0].dims, strict=False))
        for size, cut in zip(whole, choice.wants[0].dims, strict=True):
            for count, inner, own in outer if isinstance(size, int) and _is_cut(cut, found) else ():
                if isinstance(count, int) and _is_cut(own, found) and count < size == count * inner:
                    yield count, fold_layers(edit.module_path(node)) or "the model"


def _cuts(found: Solution, program: PlannedProgram) -> Iterator[tuple[str, int, str]]:
    """Iterate over the sharded dims of weights, each with its layer."""
    caches = {name for _, name in program.written()}  # cut like the values that are written to them
    leaves = {node: fqn for node, fqn in program.leaves() if fqn not in caches}
    vocabularies = _vocabularies(program)
    quantised: dict[str, torch.Size] = {}  # the weight of such a layer, whose scales are by groups
    for node, fqn in leaves.items():
        value, layer = edit.fake(node), layer_of(fqn)
        if value.ndim > 1 and (value.dtype.itemsize == 1 or not value.is_floating_point()):
            quantised[layer] = max(quantised.get(layer, value.shape), value.shape, key=torch.Size.numel)
    for node, fqn in leaves.items():
        shape, layer = edit.shape(node), fold_layers(layer_of(fqn)) or "the model"
        whole = quantised.get(layer_of(fqn), shape)
        for dim, cut in enumerate(found.leaves[node].dims if len(shape) > 1 else ()):
            if not _is_cut(cut, found):
                continue
            if packed := [size for size, by in cut.parts if by.axes] or [cut.block] * bool(cut.block):
                yield from (("features of a packed block", size, layer) for size in packed)
            elif len(whole) == len(shape) and shape[dim] < whole[dim]:
                yield "quantisation groups", shape[dim], layer
            else:
                is_vocabulary = dim == 0 and shape[0] in vocabularies
                yield "entries of the vocabulary" if is_vocabulary else "features", shape[dim], layer


def _vocabularies(program: PlannedProgram) -> set[int]:
    """Return the row counts of the tables in which the program looks up its inputs."""
    inputs = set(program.user_inputs())
    for node in edit.calls(program.graph):
        target: Any = node.target
        if isinstance(target, OpOverload) and (target.is_view or target in CASTS) and node.args[0] in inputs:
            inputs.add(node)
    looked = [edit.operands(node) for node in edit.calls(program.graph) if op_name(node) == "embedding"]
    return {edit.shape(table)[0] for table, ids in looked if ids in inputs}


def _is_cut(cut: DimSharding, found: Solution) -> bool:
    return any(axis in found.model for axis in cut.axes)


FEWEST = 'for the fewest bytes on a rank instead of the fastest call: --optimize memory (optimize="memory")'
MOST_NAMES = 4  # of layers that the plan places
NO_LATENCY = 'for the cuts that would pay without latencies: --machine ideal (machine="ideal")'


def note_search(task: Task, found: Solution, forms: Container[str] = ()) -> list[str]:
    """Report how good a solution is, and what was given up for it.

    Args:
        forms: the plan's entries for other forms, which have other notes.
    """
    notes = []
    if task.is_searched:
        notes += [_proof(task, found), *_unsearched(task, found), *_fixed(task, found, forms)]
        notes += _freedom(found) if _gathers(task) else _of_open_axes(found)
    if task.is_searched or task.limit is not None:
        notes.append(f"a rank holds about {measure_memory(found).text}")
    if found.simpler:
        names = ", ".join(name for _, name in sorted(found.simpler))
        notes.append(f"replaced by simpler ops, because a dim that they need whole is cut: {names}")
    if task.tally.has_ended:
        notes.append(f"the search ended after {task.tally.prices:,} prices: there may be better placements")
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


def _proof(task: Task, found: Solution) -> str:
    """Return how near the least of all choices a solution is, and the order in which several axes were solved."""
    call = "that" if len(found.programs) == 1 else "that, with a call of each other program,"
    if len(set(map(task.objective.weight, range(len(found.programs))))) > 1:
        call = "that, with the calls of all programs weighted as asked,"
    axes = found.turns[0] if found.turns else ()
    order = f", over {' and '.join(axes)} at once" if len(axes) > 1 else ""
    if len(found.turns) > 1:
        order = f", one axis after the other: {', then '.join(axis for (axis,) in found.turns)}"
    if found.above is None:
        return f"{call} is the least found{order}; how far above the least of all choices it may be is not known"
    proof = f"at most {math.ceil(found.above * 1e3) / 1e3:.1%} above the least" if found.above else "the least"
    return f"{call} is {proof} of all choices that were compared{order}"


def _unsearched(task: Task, found: Solution) -> Iterator[str]:
    """Yield a note on each axis over which no choice was compared."""
    searched = {axis for turn in found.turns for axis in turn}
    placed = [*found.leaves.values(), *found.settled.values()]
    placed += [each for choice in found.choices.values() for each in (*choice.wants, *choice.made)]
    used = {axis for sharding in placed for axis in sharding.axes}
    for axis in (axis for axis, degree in task.programs[0].mesh.axes if degree > 1):
        parts = {*found.mesh.parts_of(axis)}
        if parts.isdisjoint(searched):
            equal = ", so these ranks do equal work" if parts.isdisjoint(used) else ""
            yield f"over {axis} nothing was compared: no op has a choice{equal}"


def _fixed(task: Task, found: Solution, forms: Container[str]) -> Iterator[str]:
    """Yield a note on the layers that the plan places, unless the search finds nothing better without the plan."""
    planned = [own for program in task.programs for own in program.planned.values() if own.asked_by not in forms]
    less = found.seconds - found.freed if found.freed is not None and all(own.narrows for own in planned) else None
    if not planned or (less is not None and less <= 0):
        return
    names = dict.fromkeys(fold_layers(layer_of(own.leaf) or own.leaf) for own in planned)
    few = ", ".join([*names][:MOST_NAMES])
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    cost = ": no other placement was compared there"
    if less is not None and task.objective.byte_price < LEAST:
        call = "a call" if len(found.programs) == 1 else "a call of each program"
        cost = f"; without its entries {call} would take {duration(less)} less"
    yield f"the plan places {few}{more}{cost}"


def _of_open_axes(found: Solution) -> Iterator[str]:
    """Yield a note on the axes over which the batch of whole inputs is cut."""
    if found.batch:
        yield f"over {' and '.join(found.batch)} ranks share the batch of inputs that are equal on all of them"


def _gathers(task: Task) -> bool:
    rest = task.programs[0].rest
    return isinstance(rest, AnyStyle) and rest.gathers


def _freedom(found: Solution) -> Iterator[str]:
    """Yield a note on the use that a search made of its freedom to cut the batch and to gather weights."""
    static = {
        value
        for program in found.programs
        for value in computed_from_leaves(program.graph, {leaf for leaf, _ in program.leaves()})
    }
    gathered = {value for value, (kind, *_) in sends_of(found) if value in static and kind == "all_gather"}
    batch = f"the batch is cut over {' and '.join(found.batch)}" if found.batch else "the batch is not cut"
    yield f"{batch}, and {len(gathered) or 'no'} weight{'s are' if len(gathered) > 1 else ' is'} gathered for use"


class Remarks:
    """Notes on a search without a plan. They take more searches, so they are written on request."""

    def __init__(self, found: Solution, objective: Objective) -> None:
        self.found, self.objective = found, objective

    def notes(self, at: int, step: StepTime) -> Iterator[Note]:
        """The notes on one of the programs, a call of which takes so long."""
        yield Note("search", f"one call {step.text} on {self.objective.machine.name}")
        if len(self.found.given) > 1:
            alone = duration(max(0.0, step.total + self._gained_alone(at)))
            yield Note("search", f"placed alone, a call of this program would take {alone}")
        if self.objective.byte_price < LEAST and self._uncut:
            yield from (Note("uncut", each.text(at)) for each in self._uncut)
            yield Note("uncut", FEWEST)
            yield from [] if self.objective.machine.name == "ideal" else [Note("uncut", NO_LATENCY)]

    @cached_property
    def _uncut(self) -> list[Uncut]:
        with no_new_guards(*(program.graph for program in self.found.programs)):
            return find_uncut(self.found, self.objective)

    def _gained_alone(self, at: int) -> float:
        """Seconds that a call of a program takes more, or less, where the weights are placed for it alone."""
        program, machine = self.found.given[at], self.objective.machine
        with no_new_guards(program.graph):
            alone = solve(Task([program], Objective.of(machine)), PLACING)
            both = alone, replace(self.found, programs=[self.found.programs[at]])
            there, here = (measure_step_time(each, machine).total for each in both)
        return there - here
