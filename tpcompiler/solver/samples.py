"""Samples of programs with gradients: the axes that cut them, and the calls that work on them."""

from __future__ import annotations

from collections.abc import Sequence, Set

from torch import fx

from tpcompiler._torch import sym_hint
from tpcompiler.cost.objective import Samples
from tpcompiler.ir import edit
from tpcompiler.ir.program import PlannedProgram


def find_sample_axes(programs: Sequence[PlannedProgram]) -> frozenset[str]:
    """Return the axes that cut inputs of programs with gradients, except one that cuts layers too."""
    found = set[str]()
    for program in programs:
        if next(program.gradients(), None) is not None:
            planned = {axis for own in program.planned.values() for axis in own.sharding.axes}
            layers = {program.mesh.model_axis} if program.is_searched else planned & {program.mesh.model_axis}
            inputs = (program.constraints[node.name].sharding.axes for node in program.user_inputs())
            found |= {axis for axes in inputs for axis in axes} - layers
    return frozenset(found)


def find_samples(programs: Sequence[PlannedProgram]) -> tuple[Samples, Set[fx.Node]]:
    """Return the axes of samples with the numbers computed from them, and the calls that compute these."""
    axes, calls, elements = find_sample_axes(programs), set[fx.Node](), 0
    for program in programs if axes else ():
        given = {n for n in program.user_inputs() if program.constraints[n.name].sharding.axes & axes}
        for node in edit.calls(program.graph):
            if not given.isdisjoint(node.all_input_nodes):
                given.add(node)
                calls.add(node)
                elements += sum(sym_hint(value.numel()) for value in edit.outputs(node))
    return Samples(axes, elements), calls
