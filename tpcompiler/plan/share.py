"""One plan for several programs of a model: each program gets the entries that it uses."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from tpcompiler.plan.plan import Plan, refuse_unmatched
from tpcompiler.plan.styles import AUTO


def share_plan(plans: Sequence[Plan], held: Sequence[Collection[str]], used: Sequence[Collection[str]]) -> list[Plan]:
    """Return the plan of each program, without the entries that only other programs use.

    An entry must match in at least one program, and `"**": auto` may leave nothing to the search. A program that holds
    the named weights without using them, as a decoder step holds its encoder's weights, leaves the entry to the
    programs that use them.

    Args:
        plans: one plan in the names of each program.
        held: the names in each program that a plan may use.
        used: the subset that the program's ops use.

    Raises:
        PlanError: an entry matches in no program.
    """
    matched, busy = ([_matches(*both) for both in zip(plans, names, strict=True)] for names in (held, used))
    every = [name for names in held for name in names]
    for plan in plans:
        matching = [entry for entry in plan.entries if any(entry.where in matches for matches in matched)]
        refuse_unmatched(plan.entries, matching, every)
    elsewhere = set[str]().union(*busy)
    notes = set(plans[0].notes).intersection(*(plan.notes for plan in plans))
    return [
        replace(
            plan,
            entries=tuple(e for e in plan.entries if e.style == AUTO or e.where in own or e.where in has - elsewhere),
            notes=tuple(note for note in plan.notes if note in notes),
        )
        for plan, has, own in zip(plans, matched, busy, strict=True)
    ]


def join_plans(plans: Sequence[Plan]) -> Plan:
    entries = {entry.pattern: entry for plan in plans for entry in plan.entries}
    return replace(plans[0], entries=tuple(entries.values()))


def _matches(plan: Plan, names: Collection[str]) -> set[str]:
    return {entry.where for entry in plan.entries if any(map(entry.matches, names))}
