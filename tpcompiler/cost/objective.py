"""What a choice costs, in seconds of one call on one rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from tpcompiler._torch import sym_hint
from tpcompiler.cost.machine import Machine
from tpcompiler.cost.path import steps_between
from tpcompiler.ir.dim_sharding import Size
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.sharding import Sharding
from tpcompiler.rules.infer import Option
from tpcompiler.rules.notation import Rule


class Objective(NamedTuple):
    """What counts, on a machine.

    Attributes:
        step: seconds of each collective beside its bytes.
        held: the share that counts of the bytes of weights that a rank holds.
        products: the share that counts of the seconds of ops that multiply and sum.
        others: the same of all other ops, which a compiler fuses with what makes or takes their values.
    """

    machine: Machine
    step: float
    held: float
    products: float
    others: float

    def keeping_cuts(self) -> Objective:
        """The same for an axis that cuts an input: of equal bytes, those win between which more stays cut, such as
        reduce_scatter and all_gather, and what is cut is computed so.
        """
        return self._replace(step=min(self.step, 1e-16), products=1.0)

    def change_seconds(self, source: Sharding, target: Sharding, value: torch.Tensor, mesh: Mesh) -> float:
        """Of a change of sharding: what its collectives take on the machine's links, and `step` for each."""
        steps = steps_between(source, target, value.shape, value.element_size(), mesh)
        return sum(
            self.machine.link(step.kind, mesh.size(step.axes)).seconds(step.wire_bytes) + self.step
            for step in steps
            if step.kind not in ("slice", "hold")
        )

    def compute_seconds(self, flops: float, values: Sequence[tuple[torch.Tensor, Sharding]], mesh: Mesh) -> float:
        """Of the largest share of an op, by the roofline (Williams, Waterman and Patterson, 2009)."""
        share = self.products if flops else self.others
        moved = sum(local_bytes(value, sharding, mesh) for value, sharding in values) if share else 0
        return share * max(flops / self.machine.flops, moved / self.machine.memory_bandwidth)

    def held_seconds(self, count: float) -> float:
        """What it is worth to hold so many bytes of weights less: as much as to send them once.

        One call of a program is no measure of what weights cost: they are read in every step, and must fit.
        """
        return self.held * count / self.machine.plain_link.bandwidth


# Of each step about 2 KB on the link, so that fewer collectives win where bytes are nearly the same.
SEARCHED = Objective(Machine.read(), step=5e-9, held=1.0, products=1.0, others=0.0)
# A plan has decided who holds and computes what: bytes on the wire count, and the rest next to nothing.
PLANNED = Objective(Machine.read(), step=1e-12, held=1e-5, products=0.01, others=1e-5)


def local_bytes(value: torch.Tensor, sharding: Sharding, mesh: Mesh) -> int:
    """Of the first rank, which holds most."""
    shape = [sym_hint(size) for size in value.shape]
    return _count(sharding.local_shape(shape, mesh, mesh.coordinate(0))) * value.element_size()


def _count(shape: Sequence[Size]) -> int:
    total = 1
    for size in shape:
        total *= sym_hint(size)
    return total


def local_flops(rule: Rule | None, option: Option, mesh: Mesh) -> float:
    """Of a product of two operands that is summed, on one rank."""
    if rule is None or len(rule.pattern.inputs) - len(rule.pattern.addends) != 2 or not rule.reduced:
        return 0.0
    left, right, made = (
        {factor for term in terms for dim in term for factor in dim}
        for terms in (rule.pattern.inputs[:1], rule.pattern.inputs[1:], rule.pattern.outputs)
    )
    total = 2.0 * math.prod(sym_hint(rule.extent[factor]) for factor in (left & (right | made)) | right)
    under, over = (
        math.prod(sym_hint(rule.extent[factor]) for factor in own) for own in (left - right - made, made - left - right)
    )
    # A window moves over the space of its input, of which there is one result each, or one input where it is spread.
    total *= min(under, over) if made - left - right else under
    return total / mesh.size(tuple({axis for cut in option.cuts.values() for axis in cut.axes}))
