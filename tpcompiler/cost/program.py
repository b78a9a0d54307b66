"""Wire bytes of a marked program's changes of sharding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import fx

from tpcompiler.cost.machine import Machine
from tpcompiler.cost.path import Step, steps_along, steps_between
from tpcompiler.ir import edit
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.program import MarkedProgram, Reshard, Why, mark_of
from tpcompiler.ir.sharding import Sharding


class Change(NamedTuple):
    """A change of a value's sharding, with its kind and its wire bytes per rank."""

    value: fx.Node
    to: Sharding
    why: Why
    wire_bytes: int


def changes(program: MarkedProgram, machine: Machine) -> Iterator[Change]:
    """Yield every change of sharding in one call, for each use of a value."""
    for node in program.graph.nodes:
        mark = mark_of(node)
        planned: list[tuple[fx.Node, Sharding, Sharding, Why]] = []
        for operand, want in zip(edit.operands(node), mark.wants, strict=False):
            have = mark_of(operand).settled[0]
            planned.append((operand, have, want, "inherent" if have.partial else mark.why))
        for own, settled in zip(mark.shardings, mark.settled, strict=True):
            planned.append((node, own, settled, "inherent" if own.partial else "fallback"))
        tensors = [operand.meta["val"] for operand in edit.operands(node)][: len(planned) - len(mark.shardings)]
        tensors += edit.outputs(node) if mark.shardings else ()
        for (value, have, want, why), tensor in zip(planned, tensors, strict=True):
            steps = steps_between(have, want, tensor.shape, tensor.element_size(), program.mesh, machine)
            yield Change(value, want, why, sum(step.wire_bytes for step in steps))


def steps_of(change: Reshard, value: torch.Tensor, mesh: Mesh) -> tuple[Step, ...]:
    """Return the steps, collectives and local ones, of a change of a global value."""
    steps = steps_along(change.states, value.shape, value.element_size(), mesh)
    assert steps is not None
    return steps


def held_by_first(step: Step, dtype: torch.dtype) -> bool:
    """Return True if the step makes a pending reduction without equal shares: a sum of integers, or a product."""
    op = dict(step.target.partial).get(step.axes[0]) if step.kind == "hold" else None
    return op == "product" or (op == "sum" and not (dtype.is_floating_point or dtype.is_complex))
