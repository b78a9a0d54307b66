"""Wire bytes of the changes of sharding of a placed program."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import fx

from tpcompiler.cost.machine import Machine
from tpcompiler.cost.path import Step, steps_along, steps_between
from tpcompiler.ir import edit
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.node_placement import Reshard, reshard_of
from tpcompiler.ir.program import PIN, PlacedProgram, reshard
from tpcompiler.ir.sharding import Sharding
from tpcompiler.runtime.records import Why


class Change(NamedTuple):
    """A change of a value's sharding, with its kind and its wire bytes per rank."""

    value: fx.Node
    to: Sharding
    why: Why
    wire_bytes: int


def changes(program: PlacedProgram, machine: Machine) -> Iterator[Change]:
    """Iterate over the changes of sharding of one call, once for each use of a value."""
    for node in edit.calls(program.graph):
        if node.target is reshard:
            (operand,), change = edit.operands(node), reshard_of(node)
            value, ends = edit.fake(operand), (change.source, change.target)
            steps = steps_between(*ends, value.shape, value.element_size(), program.mesh, machine)
            yield Change(value_behind(operand), change.target, change.why, sum(step.wire_bytes for step in steps))


def value_behind(node: fx.Node) -> fx.Node:
    """Return the value that reshards have changed up to here, except for what a pin has asked for."""
    while node.target is reshard and PIN not in node.meta:
        (node,) = edit.operands(node)
    return node


def steps_of(change: Reshard, value: torch.Tensor, mesh: Mesh) -> tuple[Step, ...]:
    """Return the steps, collectives and local ones, of a change of a global value."""
    steps = steps_along(change.states, value.shape, value.element_size(), mesh)
    assert steps is not None
    return steps


def held_by_first(step: Step, dtype: torch.dtype) -> bool:
    """Return True if the step makes a pending reduction without equal shares: a sum of integers, or a product."""
    op = dict(step.target.partial).get(step.axes[0]) if step.kind == "hold" else None
    return op == "product" or (op == "sum" and not (dtype.is_floating_point or dtype.is_complex))
