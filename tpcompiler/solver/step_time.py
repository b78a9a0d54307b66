"""How long one call takes on a machine, by what the search decided: an estimate, of the rank that does most."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from tpcompiler.cost.machine import Machine
from tpcompiler.cost.objective import Objective, local_flops
from tpcompiler.ir import edit
from tpcompiler.ir.program import pin
from tpcompiler.solver.solution import Solution


class StepTime(NamedTuple):
    """Seconds of one call on one rank: of its ops one after the other, and of its collectives."""

    compute: float
    network: float

    @property
    def total(self) -> float:
        return self.compute + self.network


def measure_step_time(
    found: Solution, collectives: Iterable[tuple[str, int, int]], machine: Machine, *, fused: bool
) -> StepTime:
    """Each op by the roofline, each collective by its link, nothing at the same time as another.

    Args:
        collectives: (kind, ranks, wire bytes of a rank) of each.
        fused: ops that are no products take no time of their own, as where a compiler fuses them.
    """
    objective, compute = Objective(machine, step=0.0, held=0.0, products=1.0, others=0.0 if fused else 1.0), 0.0
    for program in found.programs:
        for node in edit.calls(program.graph):
            if (choice := found.choices.get(node)) is not None and node.target is not pin:
                tensors = [*(operand.meta["val"] for operand in edit.operands(node)), *edit.outputs(node)]
                flops = local_flops(choice.rule, choice.option, found.mesh)
                moved = list(zip(tensors, (*choice.wants, *choice.made), strict=True))
                compute += objective.compute_seconds(flops, moved, found.mesh)
    return StepTime(compute, sum(machine.link(kind, ranks).seconds(sent) for kind, ranks, sent in collectives))
