"""Choose the collectives of every reshard."""

from __future__ import annotations

from dataclasses import replace

from tpcompiler.cost.machine import Machine
from tpcompiler.cost.path import steps_between
from tpcompiler.ir import edit
from tpcompiler.ir.node_placement import PLACEMENT, placement_of, reshard_of
from tpcompiler.ir.program import PlacedProgram, reshard


def choose_paths(program: PlacedProgram, machine: Machine) -> PlacedProgram:
    """Put on every `reshard` what its value is on the way, by the steps that take least time on a machine.

    Before    reshard: [R, R] = reshard(y)          y: [S(0), P(sum)]
    After     the same, via [S(0), S(0)]            reduce_scatter over tp, all_gather over dp and tp

    The search priced the change by these steps. From here on no pass knows a machine.
    """
    graph = edit.copy_graph(program.graph)
    for node in edit.calls(graph):
        if node.target is reshard:
            change = reshard_of(node)
            value = edit.fake(edit.operands(node)[0])
            ends = change.source, change.target
            steps = steps_between(*ends, value.shape, value.element_size(), program.mesh, machine)
            change = replace(change, via=tuple(step.target for step in steps[:-1]))
            node.meta[PLACEMENT] = replace(placement_of(node), reshard=change)
    return replace(program, graph=graph)
