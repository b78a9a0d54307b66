"""Prices of a whole program with another choice for an op or a leaf, or with a layer cut that is whole."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import NamedTuple

from torch import fx

from tpcompiler.cost.objective import Objective
from tpcompiler.cost.timeline import duration
from tpcompiler.errors import UnsupportedError
from tpcompiler.ir import edit
from tpcompiler.ir.memo import Memo
from tpcompiler.ir.names import fold_layers, layer_of
from tpcompiler.ir.program import PlannedProgram, relax
from tpcompiler.ir.sharding import Sharding
from tpcompiler.solver.estimate import measure_memory, measure_step_time
from tpcompiler.solver.problem import Problem
from tpcompiler.solver.search import RETRIES, search, solve
from tpcompiler.solver.solution import Layered, Solution
from tpcompiler.solver.task import Fixed, Task
from tpcompiler.terminal.printed import format_bytes
from tpcompiler.terminal.progress import counted


class Otherwise(NamedTuple):
    """One way in which a call may run, or one sharding of a leaf (`wants` is empty).

    `axes`: a choice over the last of these, given the solution over those before. `solution`: the cheapest of all
    programs with it; of infinite seconds if none has it.
    """

    axes: tuple[str, ...]
    wants: tuple[Sharding, ...]
    made: tuple[Sharding, ...]
    solution: Solution


class _Option(NamedTuple):
    wants: tuple[Sharding, ...]
    made: tuple[Sharding, ...]
    fixed: list[tuple[int, list[bool]]]


def price_otherwise(found: Solution, value: fx.Node, task: Task) -> list[Otherwise]:
    """Every choice of a call or a leaf of `found.programs`, axis by axis, each with the least total that it leaves.

    Exact, as the search is: the variable is fixed to each of its values in turn, and the rest is solved again. Axes are
    solved in the turns of `found`: later ones follow. Axes that run as two, and ops in simpler ones, stay as
    they are in `found`, the solution of `task`, whose problems are solved again.
    """
    options: list[tuple[tuple[str, ...], _Option]] = []
    open_axes, mesh = {axis for turn in found.turns for axis in turn}, found.mesh
    closed = [axis for axis in mesh.names if mesh.degree(axis) > 1 and axis not in open_axes]
    turns = (*found.turns, *((axis,) for axis in closed)) if found.turns else ()  # where nothing is open, as ever

    def note_options(problem: Problem) -> Iterator[tuple[int, list[bool]]]:
        each = _of_leaf(problem, value) if value in problem.groups else _of_call(problem, value)
        options.extend((problem.turn.axes, option) for option in each)
        yield from ()

    kept = Memo() if task.kept is None else task.kept
    task = replace(task, programs=found.programs, model=found.model, turns=turns, kept=kept)

    def solve(fixed: Fixed) -> Solution:
        return search(replace(task, fixed=fixed))

    def fixing(axes: tuple[str, ...], option: _Option) -> Fixed:
        return lambda problem: option.fixed if problem.turn.axes == axes else ()

    solve(note_options)
    return [
        Otherwise(axes, each.wants, each.made, solve(fixing(axes, each)))
        for axes, each in counted(options, "trying other choices", "choices")
    ]


def _of_call(problem: Problem, call: fx.Node) -> Iterator[_Option]:
    each = problem.choices[call].each
    for at, choice in enumerate(each):
        fixed = [(problem.variables[call], [i == at for i in range(len(each))])] if len(each) > 1 else []
        yield _Option(choice.wants, choice.made, fixed)


def _of_leaf(problem: Problem, leaf: fx.Node) -> Iterator[_Option]:
    """Price a leaf without a plan entry by the shardings that its uses want, the same for all."""
    if (group := problem.groups[leaf]) in problem.leaves:
        variable, shardings = problem.leaves[group]
        for at, sharding in enumerate(shardings):
            own = [] if variable is None else [(variable, [i == at for i in range(len(shardings))])]
            yield _Option((), (sharding,), own)
        return
    uses = [
        (problem.variables.get(call), problem.choices[call].wants[index])
        for domain in problem.domains
        for call, operands in domain.operands.items()
        for index, operand in enumerate(operands)
        if problem.groups.get(operand) == group and call in problem.choices
    ]
    for sharding in dict.fromkeys(each for _, wants in uses for each in wants):
        fixed = [(variable, _equal(wants, sharding)) for variable, wants in uses if variable is not None]
        if all(any(_equal(wants, sharding)) for _, wants in uses):
            yield _Option((), (sharding,), fixed)


def _equal(wants: Sequence[Sharding], sharding: Sharding) -> list[bool]:
    return [want == sharding for want in wants]


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
    kept = Memo()
    freed = _search(found, programs, objective, (), kept) if is_asked else None
    least = found if freed is None or found.seconds <= freed.seconds else freed
    together: dict[frozenset[str], tuple[list[str], Solution]] = {}
    for group in counted(largest, "cutting what stays whole", "groups of layers"):
        cut = _search(found, programs, objective, groups[group], kept)
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
    found: Solution, programs: Sequence[PlannedProgram], objective: Objective, cut: Collection[str], kept: Memo
) -> Solution | None:
    """The cheapest placements with these weights cut; None where their tables are too large."""
    try:
        task = Task(programs, objective, known=kept, model=found.model, kept=kept, fixed=_fixing(found, cut))
        return solve(task, RETRIES[:1])
    except UnsupportedError:
        return None


def _fixing(found: Solution, cut: Collection[str]) -> Fixed:
    def fixed(problem: Problem) -> Iterator[tuple[int, list[bool]]]:
        for weight, layer in problem.layers.items() if found.model[0] in problem.turn.own else ():
            dims = list(layer.styles.values())
            own = found.layers.get(weight)
            if weight in cut and any(dim is not None for dim in dims):
                yield layer.variable, [dim is not None for dim in dims]
            elif own is not None and own.dim is not None:
                yield layer.variable, [dim == own.dim for dim in dims]

    return fixed


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
