"""Placements without a plan: the search for the cheapest."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tpcompiler.cost.objective import PLANNED, SEARCHED
from tpcompiler.errors import ShardingError
from tpcompiler.ir.program import Note, PlannedProgram
from tpcompiler.solver.solution import Solution, search


def place(programs: Sequence[PlannedProgram], auto: bool) -> tuple[list[PlannedProgram], Solution, dict[str, str]]:
    """The cheapest placements of all values, and without a plan the style that each layer got.

    Raises:
        ShardingError: none suits all that is asked for.
    """
    found = search(programs, SEARCHED if auto else PLANNED, free=auto)
    if math.isinf(found.seconds):
        raise ShardingError(
            "no placement of all values suits what is asked for",
            help="pin less in the plan and at the boundary, or use a degree that divides more of the sizes",
        )
    text = f"ops and values that had more choices than were looked at: {found.capped}"
    more = (Note("search", text),) if found.capped else ()
    kept = [
        replace(program, notes=(*(n for n in program.notes if not (auto and n.kind == "untouched")), *more))
        for program in found.programs
    ]
    return kept, found, shorten({name: style or "replicate" for name, style in found.styles.items()})


def shorten(styles: Mapping[str, str]) -> dict[str, str]:
    """Entries for layers by number, where all of a name have one style: `layers.*.mlp.up`."""
    groups: dict[str, set[str]] = {}
    for name, style in styles.items():
        groups.setdefault(_numberless(name), set()).add(style)
    return {
        (_numberless(name) if len(groups[_numberless(name)]) == 1 else name): style for name, style in styles.items()
    }


def _numberless(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
