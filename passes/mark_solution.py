"""Put what the search found on every node."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from passes.mark_placements import mark_output, mark_with
from tpcompiler.ir import edit
from tpcompiler.ir.notes import notes_of
from tpcompiler.ir.program import MARK, PIN, Mark, MarkedProgram, PlannedProgram, mark_of, pin, tied
from tpcompiler.ir.sharding import Sharding
from tpcompiler.rules.infer import Option
from tpcompiler.rules.registry import rule_of
from tpcompiler.solver.domain import tensor_index
from tpcompiler.solver.problem import FREE
from tpcompiler.solver.solution import Solution


def mark_solution(program: PlannedProgram, found: Solution) -> MarkedProgram:
    """Put a Mark on every node, as the search chose.

    Before    x, w1, w2                             found: linear: n cut, linear_1: k cut
              h = linear(x, w1)
              y = linear(h, w2)
              pin_1 = pin(y)                        pinned to R
    After     x: R, w1: S(0), w2: S(1)              leaves as their uses take them
              h: S(1) = linear(x, w1)
              y: P(sum) = linear(h, w2)             reduced by whoever needs it
              pin_1: R = pin(y)

    The nodes of the solution are those of the program's own graph.
    """
    wanted = _wanted(program, found)
    marks = {node: _mark(node, program, found, wanted) for node in program.graph.nodes if node.op != "output"}
    for node, mark in marks.items():
        node.meta[MARK] = mark
    graph = edit.copy_graph(program.graph)
    for node in marks:
        del node.meta[MARK]
    marked = MarkedProgram(program.source, graph, program.mesh, program.notes)
    for node in edit.calls(graph):  # what reads sizes takes a value as it is
        if not edit.outputs(node) and node.target in FREE:
            seen = tuple(mark_of(operand).settled[0] for operand in edit.operands(node))
            node.meta[MARK] = Mark((), (), seen, "no tensor")
    mark_output(marked)
    return MarkedProgram(program.source, graph, program.mesh, (*program.notes, *notes_of(marked)))


def _wanted(program: PlannedProgram, found: Solution) -> dict[str, Sharding]:
    """Placeholder -> what all uses of a leaf want; whole, where they disagree."""
    first_of, wishes = tied(program), dict[str, set[Sharding]]()
    names = {node.name for node, _ in program.leaves()}
    for node, choice in found.choices.items():
        if node.target in FREE:
            continue
        for operand, want in zip(edit.operands(node), choice.wants, strict=True):
            if operand.name in names:
                wishes.setdefault(first_of[operand.name], set()).add(want)
    return {name: next(iter(wishes[first])) for name, first in first_of.items() if len(wishes.get(first, ())) == 1}


def _mark(node: fx.Node, program: PlannedProgram, found: Solution, wanted: dict[str, Sharding]) -> Mark:
    if node.op == "placeholder":
        if node.name in program.input_shardings:
            sharding, reason = program.input_shardings[node.name], "an input"
        elif edit.is_tensor(node):
            sharding = wanted.get(node.name, Sharding.replicated(node.meta["val"].ndim))
            reason = "as its uses want it"
        else:
            return Mark((), (), (), "no tensor")
        return Mark((sharding,), (sharding,), (), reason)
    if node.op != "call_function":
        return Mark((), (), (), "a body")
    if node.target is operator.getitem:
        if not edit.is_tensor(node):
            return Mark(
                (), (), tuple(Sharding.replicated(o.meta["val"].ndim) for o in edit.operands(node)), "no tensor"
            )
        source: Any = node.args[0]
        made = found.choices[source].made[tensor_index(source, node.args[1])]
        return Mark((made,), (found.settled.get(node, made),), (), f"a part of {source}")
    choice = found.choices[node]
    if node.target is pin:
        return Mark(choice.made, choice.made, choice.wants, node.meta[PIN].asked_by, "plan-demanded")
    if not edit.outputs(node):
        return Mark((), (), choice.wants, "no tensor")
    settled = tuple(found.settled.get(node, made) for made in choice.made) if edit.is_tensor(node) else choice.made
    return mark_with(
        node, rule_of(node), choice.option, (choice.made, settled, choice.wants), _reason(choice.option), "inherent"
    )


def _reason(option: Option) -> str:
    cuts = [f"{factor} is cut by {' and '.join(cut.axes)}" for factor, cut in option.cuts.items()]
    through = [f"a pending {op} over {axis} passes through" for axis, (op, _) in option.through.items()]
    return "; ".join([*cuts, *through]) or "operands are replicated"
