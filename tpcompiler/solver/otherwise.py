"""Cost of the whole program with another choice for one op or leaf."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import fx

from tpcompiler.cost.objective import Objective
from tpcompiler.ir.sharding import Sharding
from tpcompiler.solver.problem import Problem
from tpcompiler.solver.search import search
from tpcompiler.solver.solution import Solution
from tpcompiler.solver.task import Held, Task
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
    held: list[tuple[int, list[bool]]]


def price_otherwise(found: Solution, value: fx.Node, objective: Objective) -> list[Otherwise]:
    """Every choice of a call or a leaf of `found.programs`, axis by axis, each with the least total that it leaves.

    Exact, as the search is: the variable is held to each of its values in turn, and the rest is solved again. Axes are
    solved in the turns of `found`: later ones follow. Axes that run as two, and ops in simpler ones, stay as
    they are in `found`.
    """
    options: list[tuple[tuple[str, ...], _Option]] = []
    open_axes, mesh = {axis for turn in found.turns for axis in turn}, found.mesh
    closed = [axis for axis in mesh.names if mesh.degree(axis) > 1 and axis not in open_axes]
    turns = (*found.turns, *((axis,) for axis in closed)) if found.turns else ()  # where nothing is open, as ever

    def note_options(problem: Problem) -> Iterator[tuple[int, list[bool]]]:
        each = _of_leaf(problem, value) if value in problem.groups else _of_call(problem, value)
        options.extend((problem.stage.axes, option) for option in each)
        yield from ()

    task = Task(found.programs, objective, model=found.model, turns=turns)

    def solve(held: Held) -> Solution:
        return search(replace(task, held=held))

    def holding(axes: tuple[str, ...], option: _Option) -> Held:
        return lambda problem: option.held if problem.stage.axes == axes else ()

    solve(note_options)
    return [
        Otherwise(axes, each.wants, each.made, solve(holding(axes, each)))
        for axes, each in counted(options, "trying other choices", "choices")
    ]


def _of_call(problem: Problem, call: fx.Node) -> Iterator[_Option]:
    each = problem.choices[call].each
    for at, choice in enumerate(each):
        held = [(problem.variables[call], [i == at for i in range(len(each))])] if len(each) > 1 else []
        yield _Option(choice.wants, choice.made, held)


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
        held = [(variable, _equal(wants, sharding)) for variable, wants in uses if variable is not None]
        if all(any(_equal(wants, sharding)) for _, wants in uses):
            yield _Option((), (sharding,), held)


def _equal(wants: Sequence[Sharding], sharding: Sharding) -> list[bool]:
    return [want == sharding for want in wants]
