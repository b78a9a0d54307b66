"""Layers that the search leaves whole, and what a call would take with them cut."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from tpcompiler.cost.objective import Objective
from tpcompiler.cost.timeline import duration
from tpcompiler.errors import UnsupportedError
from tpcompiler.ir import edit
from tpcompiler.ir.names import fold_layers, layer_of
from tpcompiler.ir.program import PlannedProgram, relax
from tpcompiler.solver.drive import RETRIES, solve
from tpcompiler.solver.memory import measure_memory
from tpcompiler.solver.problem import Problem
from tpcompiler.solver.solution import Layered, Solution
from tpcompiler.solver.stage import Known
from tpcompiler.solver.step_time import measure_step_time
from tpcompiler.solver.task import Held, Task
from tpcompiler.terminal.printed import format_bytes
from tpcompiler.terminal.progress import counted

MOST_GROUPS = 4  # that are searched again, those that hold most


@dataclass(frozen=True)
class Uncut:
    """Layers of one name that are whole on every rank.

    Attributes:
        names: repeated layers folded: `layers.*.mlp`.
        held: bytes of their weights.
        seconds: what a call of each program takes more with all of them cut, and the rest free to follow.
        saved: bytes of weights that a rank then holds less.
    """

    names: str
    held: int
    seconds: tuple[float, ...]
    saved: int

    def text(self, at: int) -> str:
        """Describe the cost for a call of one of the programs."""
        more = self.seconds[at]
        longer = f"{duration(abs(more))} {'more' if more >= 0 else 'less'}" if more else "as long"
        saved = f", and a rank holds {format_bytes(self.saved)} less" if self.saved > 0 else ""
        return f"{self.names}: {format_bytes(self.held)} on every rank; cut, a call takes {longer}{saved}"


def find_uncut(found: Solution, objective: Objective) -> list[Uncut]:
    """The layers that cutting would slow, and by how much: one more search for each of the largest groups.

    Layers that are cut stay so, and those that are whole may follow the ones that are cut now, whatever a plan says.
    """
    groups: dict[str, dict[str, Layered]] = {}
    for weight, layer in found.layers.items():
        if layer.dim is None:
            groups.setdefault(_group_of(layer), {})[weight] = layer
    held = {group: _bytes_of(found, layers) for group, layers in groups.items()}
    largest = sorted(groups, key=lambda group: -held[group])[:MOST_GROUPS]
    if not largest:
        return []
    programs = [relax(program, attrgetter("narrows")) for program in found.programs]
    is_asked = any(own.narrows for program in found.programs for own in program.planned.values())
    read = Known()
    freed = _search(found, programs, objective, (), read) if is_asked else None
    least = found if freed is None or found.seconds <= freed.seconds else freed
    together: dict[frozenset[str], tuple[list[str], Solution]] = {}
    for group in counted(largest, "cutting what stays whole", "groups of layers"):
        cut = _search(found, programs, objective, groups[group], read)
        if cut is not None and least.seconds < cut.seconds < math.inf:
            are_cut = frozenset(weight for weight, layer in cut.layers.items() if layer.dim is not None)
            together.setdefault(are_cut, ([], cut))[0].append(group)
    rows = []
    for names, cut in together.values():
        layers = [layer for name in names for layer in groups[name].values()]
        seconds = tuple(b - a for a, b in zip(_seconds(least, objective), _seconds(cut, objective), strict=True))
        saved = measure_memory(least).weights - measure_memory(cut).weights
        rows.append(Uncut(_names_of(found, layers), sum(map(held.__getitem__, names)), seconds, saved))
    return rows


def _search(
    found: Solution, programs: Sequence[PlannedProgram], objective: Objective, cut: Collection[str], read: Known
) -> Solution | None:
    """The cheapest placements with these weights cut; None where their tables are too large."""
    try:
        task = Task(programs, objective, known=read, model=found.model, held=_holding(found, cut))
        return solve(task, RETRIES[:1])
    except UnsupportedError:
        return None


def _holding(found: Solution, cut: Collection[str]) -> Held:
    def held(problem: Problem) -> Iterator[tuple[int, list[bool]]]:
        for weight, layer in problem.layers.items() if found.model[0] in problem.stage.own else ():
            dims = list(layer.styles.values())
            own = found.layers.get(weight)
            if weight in cut and any(dim is not None for dim in dims):
                yield layer.variable, [dim is not None for dim in dims]
            elif own is not None and own.dim is not None:
                yield layer.variable, [dim == own.dim for dim in dims]

    return held


def _group_of(layer: Layered) -> str:
    """The part of a repeated module that a layer is in (`layers.*.mlp`), or the layer."""
    name = fold_layers(layer.name)
    found = re.match(r".*?\*(?:\.[^.]+(?=\.))?", name)
    return found[0] if found else name


def _names_of(found: Solution, layers: Iterable[Layered]) -> str:
    """Each group if all of its layers are whole, otherwise the layers."""
    whole, every = Counter(map(_name_of, layers)), Counter(map(_name_of, found.layers.values()))
    names = dict.fromkeys(
        group
        if all(whole[group, name] == count for (other, name), count in every.items() if other == group)
        else name
        if each == every[group, name]
        else f"{name} ({each} of {every[group, name]})"
        for (group, name), each in whole.items()
    )
    return ", ".join(names)


def _name_of(layer: Layered) -> tuple[str, str]:
    """Its group, and the layer with those like it."""
    return _group_of(layer), fold_layers(layer.name)


def _bytes_of(found: Solution, weights: Collection[str]) -> int:
    """Return the bytes of all replicated leaves of these layers."""
    owners, held = {layer_of(weight) for weight in weights}, dict[str, int]()
    for program in found.programs:
        for node, fqn in program.leaves():
            if layer_of(fqn) in owners and found.leaves[node].is_replicated:
                value = edit.fake(node)
                held[fqn] = value.numel() * value.element_size()
    return sum(held.values())


def _seconds(found: Solution, objective: Objective) -> list[float]:
    each = (replace(found, programs=[program]) for program in found.programs)
    return [measure_step_time(one, objective.machine).total for one in each]
