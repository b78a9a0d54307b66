"""The cheapest change of a plan that does without a gather, or that an op can take: found by trying."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import fx

from tpcompiler.cost.program import changes
from tpcompiler.errors import ShardingError, TpCompilerError
from tpcompiler.ir import edit
from tpcompiler.ir.program import MarkedProgram, mark_of
from tpcompiler.plan import Plan, PlanEntry
from tpcompiler.plan.styles import STYLES, read_style

MOST, PAIRS = 8, 4  # plans that are tried for one advice: each is one run of the marking pass
SAID = 2  # of those that help, in an error

Trial = Callable[[Plan], MarkedProgram]


class Advice(NamedTuple):
    """A change of the plan in words, and the wire bytes per rank and call of the program that it gives."""

    text: str
    wire_bytes: int


def remembered(trial: Trial) -> Trial:
    """The same, where a plan is tried once: gathers of many layers have the same cause."""
    known: dict[str, MarkedProgram | TpCompilerError] = {}

    def once(plan: Plan) -> MarkedProgram:
        text = json.dumps(plan.to_data())
        if text not in known:
            try:
                known[text] = trial(plan)
            except TpCompilerError as error:
                known[text] = error
        made = known[text]
        if isinstance(made, TpCompilerError):
            raise made
        return made

    return once


def advised(error: ShardingError, plan: Plan, trial: Trial) -> ShardingError:
    """The error with the changes of the plan that avoid it as its help, cheapest first; itself where none was found."""
    found = [advice for advice, _ in _tried(plan, error.leaves, trial)]
    if not found:
        return error
    said = ", or ".join(
        f"{a.text} ({a.wire_bytes:,} wire bytes per rank and call)" for a in sorted(found, key=_cost)[:SAID]
    )
    degree, _, other = error.help.partition(", or ")
    facts = {name.replace(" ", "_"): text for name, text in error.facts.items()}
    return ShardingError(error.message, help=f"{degree}, or {said}" if other else said, **facts)


def without_gather(value: str, program: MarkedProgram, plan: Plan, trial: Trial) -> str:
    """The change of the plan that leaves out the fallback gathers of a value and saves most, in words, or nothing."""
    now = wire_bytes(program)
    tried = _tried(plan, planned_behind(program, value), trial, planned_behind(program, value, far=True))
    found = [(advice, made) for advice, made in tried if value not in _gathered(made)]
    best, made = min(found, key=lambda pair: _cost(pair[0]), default=(None, program))
    if best is None or best.wire_bytes >= now:
        return ""
    more = held_bytes(made) - held_bytes(program)
    price = f"; each rank holds {more:,} bytes more" if more > 0 else ""
    return f"{best.text} (saves {now - best.wire_bytes:,} wire bytes per rank and call{price})"


def wire_bytes(program: MarkedProgram) -> int:
    """Of one call, where a value that several uses want alike is changed once."""
    once = {(change.value, change.to): change.wire_bytes for change in changes(program) if change.wire_bytes}
    return sum(once.values())


def held_bytes(program: MarkedProgram) -> int:
    """Of the weights of one rank, the first."""
    total = 0
    for node, _ in program.leaves():
        value, mesh = node.meta["val"], program.mesh
        shape = mark_of(node).shardings[0].local_shape(value.shape, mesh, mesh.coordinate(0))
        total += torch.Size(shape).numel() * value.element_size()
    return total


def planned_behind(program: MarkedProgram, value: str, far: bool = False) -> list[str]:
    """The leaves that the plan cut and because of which the value is cut, nearest first; far: all that it comes of."""
    names = dict(program.leaves())
    queue = [node for node in program.graph.nodes if node.name == value]
    seen: dict[fx.Node, None] = {}
    for node in queue:  # it grows
        if node not in seen and (far or not mark_of(node).shardings[0].is_replicated):
            seen[node] = None
            queue += [o for o in edit.operands(node) if mark_of(o).shardings]
    return [names[node] for node in seen if node in names and mark_of(node).reason.startswith("plan: ")]


def _gathered(program: MarkedProgram) -> set[str]:
    return {change.value.name for change in changes(program) if change.why == "fallback" and change.wire_bytes}


def _cost(advice: Advice) -> int:
    return advice.wire_bytes


def _tried(
    plan: Plan, leaves: Iterable[str], trial: Trial, partners: Iterable[str] = ()
) -> Iterator[tuple[Advice, MarkedProgram]]:
    """Plans with a change that concerns these leaves, or one and a partner, with the programs that they give."""
    candidates = {text: other for leaf in leaves for text, other in _candidates(plan, leaf)}
    two = itertools.product(leaves, partners)
    pairs = {text: other for leaf, partner in two for text, other in _pairs(plan, leaf, partner)}
    for text, other in [*list(candidates.items())[:MOST], *list(pairs.items())[:PAIRS]]:
        try:
            made = trial(other)
        except TpCompilerError:
            continue
        yield Advice(text, wire_bytes(made)), made


def _candidates(plan: Plan, leaf: str) -> Iterator[tuple[str, Plan]]:
    """The other cut of the layer, the layer whole, and the leaf whole, for all that the plan's entry stands for."""
    for entry in _concerning(plan, leaf):
        others = tuple(e for e in plan.entries if e is not entry)
        if entry.style.cut is not None:
            for style in (_opposite(entry), "replicate"):
                yield f"change {_in_words(entry, style)}", _changed(plan, [(entry, style)])
        name = entry.pattern if entry.matches(leaf) else f"{entry.pattern}.{leaf.rpartition('.')[2]}"
        whole = PlanEntry(name, read_style("R", where=entry.where), entry.where)
        yield f"pin '{name}' to R", replace(plan, entries=(*(others if name == entry.pattern else plan.entries), whole))


def _concerning(plan: Plan, leaf: str) -> list[PlanEntry]:
    parts = leaf.split(".")
    names = {".".join(parts[:count]) for count in range(1, len(parts) + 1)}
    return [entry for entry in plan.entries if any(entry.matches(name) for name in names)]


def _cutting(plan: Plan, leaf: str) -> list[PlanEntry]:
    return [entry for entry in _concerning(plan, leaf) if entry.style.cut is not None]


def _pairs(plan: Plan, leaf: str, other: str) -> Iterator[tuple[str, Plan]]:
    """The opposite cuts of two layers: what one makes in shares, the next sums over."""
    for second, first in itertools.product(_cutting(plan, leaf), _cutting(plan, other)):
        if first != second:
            styles = [(each, _opposite(each)) for each in (first, second)]
            yield f"change {' and '.join(_in_words(*each) for each in styles)}", _changed(plan, styles)


def _opposite(entry: PlanEntry) -> str:
    return "rowwise" if entry.style.cut == "out" else "colwise"


def _in_words(entry: PlanEntry, style: str) -> str:
    return f"'{entry.pattern}' from {entry.style.name} to {style}"


def _changed(plan: Plan, styles: Sequence[tuple[PlanEntry, str]]) -> Plan:
    others = (entry for entry in plan.entries if entry not in [changed for changed, _ in styles])
    changed = (PlanEntry(entry.pattern, STYLES[style], entry.where) for entry, style in styles)
    return replace(plan, entries=(*others, *changed))
