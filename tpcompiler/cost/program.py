"""What the changes of sharding of a marked program cost on the wire."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import fx

from tpcompiler.cost.collective import reshard_wire_bytes
from tpcompiler.ir import edit
from tpcompiler.ir.program import MarkedProgram, Why, mark_of
from tpcompiler.ir.sharding import Sharding


class Change(NamedTuple):
    value: fx.Node
    to: Sharding
    why: Why
    wire_bytes: int


def changes(program: MarkedProgram) -> Iterator[Change]:
    """Every change of sharding of one call, for each use of a value."""
    for node in program.graph.nodes:
        mark = mark_of(node)
        found: list[tuple[fx.Node, Sharding, Sharding, Why]] = []
        for operand, want in zip(edit.operands(node), mark.wants, strict=False):
            have = mark_of(operand).settled[0]
            found.append((operand, have, want, "inherent" if have.partial else mark.why))
        found += [(node, made, settled, "inherent") for made, settled in zip(mark.shardings, mark.settled, strict=True)]
        tensors = [operand.meta["val"] for operand in edit.operands(node)][: len(found) - len(mark.shardings)]
        tensors += edit.outputs(node) if mark.shardings else ()
        for (value, have, want, why), tensor in zip(found, tensors, strict=True):
            cost = reshard_wire_bytes(have, want, tensor.shape, tensor.element_size(), program.mesh)
            yield Change(value, want, why, cost)
