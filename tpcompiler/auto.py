"""Placements without a plan: the search for the cheapest."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace

from passes.apply_plan import Boundary, apply_plan
from passes.divide_sizes import divide_sizes
from passes.join_branches import join_branches
from passes.mark_solution import mark_solution
from tpcompiler.cost.objective import H100, Machine
from tpcompiler.errors import ShardingError
from tpcompiler.ir.local import no_new_guards
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.program import CanonicalProgram, MarkedProgram, Note, PlannedProgram
from tpcompiler.plan import Plan
from tpcompiler.solver.problem import pose
from tpcompiler.solver.solution import Solution, solve


def search(program: PlannedProgram, mesh: Mesh, machine: Machine = H100) -> tuple[MarkedProgram, dict[str, str]]:
    """The cheapest placements of all values over the one axis of a mesh, and the style that each layer got.

    Raises:
        ShardingError: none suits all that is asked for.
    """
    found = _solved(program, mesh, machine)
    notes = [note for note in program.notes if note.kind != "untouched"]
    if found.capped:
        notes.append(Note("search", f"values whose users would have more shardings to choose from: {found.capped}"))
    return mark_solution(replace(program, notes=tuple(notes)), found), _styles(found)


def find_plan(
    program: CanonicalProgram, mesh: Mesh, boundary: tuple[Boundary, Boundary], machine: Machine = H100
) -> Plan:
    """The styles that `search` finds over the axis of a mesh that splits layers.

    Raises:
        ShardingError: as `search`.
    """
    with no_new_guards(program.graph):
        planned = divide_sizes(join_branches(apply_plan(program, Plan(), mesh, *boundary)))
    with no_new_guards(planned.graph):
        found = _solved(planned, Mesh(((mesh.model_axis, mesh.degree(mesh.model_axis)),)), machine)
    return Plan.of(shorten(_styles(found)))


def _solved(program: PlannedProgram, mesh: Mesh, machine: Machine) -> Solution:
    found = solve(pose(program, mesh, machine))
    if math.isinf(found.seconds):
        raise ShardingError(
            "no placement of all values suits what is asked for",
            help="pin less in the plan and at the boundary, or use a degree that divides more of the sizes",
        )
    return found


def _styles(found: Solution) -> dict[str, str]:
    return {name: style or "replicate" for name, style in found.styles.items()}


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
