"""What a choice costs, in seconds of one call on one rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import fx

from tpcompiler._torch import sym_hint
from tpcompiler.cost.kernels import Kernel, factors_of_product, is_attention, rows_share
from tpcompiler.cost.machine import Machine
from tpcompiler.cost.path import steps_between
from tpcompiler.ir.dim_sharding import Size
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.sharding import Sharding
from tpcompiler.rules.infer import Option
from tpcompiler.rules.notation import Rule

STEP = 1e-12  # seconds: of equals, the one with fewer collectives
TIE = 1e-3  # of the time to read a byte: of equals, the one that holds or looks at fewer
LEAST = 2e-9  # seconds: where few bytes are to be held, a small matrix is worth more than a collective; a vector is not


class Work(NamedTuple):
    """FLOPs of a rank's part of an op, and the rows of its product."""

    flops: float = 0.0
    rows: float = 0.0


class Objective(NamedTuple):
    """The predicted time of one call on a machine, on the rank that does most.

    Products, attentions and other kernels take their floor and the longer of two times: for their FLOPs, and for the
    bytes that they move (the roofline of Williams, Waterman and Patterson, 2009). A collective takes the fastest of
    its links.

    Attributes:
        held: seconds that a byte of weights is worth; next to nothing breaks ties.
        calls: of programs that are placed together, how much a call of each counts; by default all count 1.
    """

    machine: Machine
    held: float
    calls: tuple[float, ...] = ()

    @classmethod
    def of(cls, machine: Machine, held: float | None = None, calls: tuple[float, ...] = ()) -> Objective:
        """`held`: by default a small share of the time to read a byte of weights."""
        return cls(machine, TIE / machine.memory_bandwidth if held is None else held, calls)

    def weight(self, program: int) -> float:
        """How much a call of a program counts."""
        return self.calls[program] if self.calls else 1.0

    def change_seconds(self, source: Sharding, target: Sharding, value: torch.Tensor, mesh: Mesh) -> float:
        """Of a change of sharding: what its collectives take."""
        steps = steps_between(source, target, value.shape, value.element_size(), mesh)
        return sum(
            self.machine.collective_seconds(step.kind, step.axes, step.wire_bytes, mesh) + STEP
            for step in steps
            if step.kind not in ("slice", "hold")
        )

    def floor_seconds(self, kernel: Kernel) -> float:
        """What the kernel takes that an op begins, whatever the op's size."""
        machine = self.machine
        floors = {"": 0.0, "product": machine.product, "attention": machine.attention, "other": machine.other}
        return floors[kernel.floor]

    def work_seconds(self, work: Work, moved: float) -> float:
        """What FLOPs or bytes take, whichever is longer."""
        return max(work.flops / self.machine.flops_of(work.rows), moved / self.machine.memory_bandwidth)

    def tie_seconds(self, values: Sequence[tuple[torch.Tensor, Sharding]], mesh: Mesh) -> float:
        """Of ways that take as long, such as a view before a change or after it, the one on fewer bytes wins."""
        return TIE * sum(local_bytes(*value, mesh) for value in values) / self.machine.memory_bandwidth

    def held_seconds(self, count: float) -> float:
        """What it is worth to hold so many bytes of weights less."""
        return self.held * count


def moved_bytes(kernel: Kernel, values: Sequence[tuple[torch.Tensor, Sharding]], mesh: Mesh) -> float:
    """Bytes that an op reads and writes on the first rank, which does most. `values`: operands, then results."""
    pairs = zip(kernel.moves, values, strict=bool(kernel.moves))
    return sum(share * local_bytes(value, sharding, mesh) for share, (value, sharding) in pairs if share)


def local_bytes(value: torch.Tensor, sharding: Sharding, mesh: Mesh) -> int:
    """Of the first rank, which holds most."""
    shape = [sym_hint(size) for size in value.shape]
    return _count(sharding.local_shape(shape, mesh, mesh.coordinate(0))) * value.element_size()


def _count(shape: Sequence[Size]) -> int:
    total = 1
    for size in shape:
        total *= sym_hint(size)
    return total


def local_work(node: fx.Node, rule: Rule | None, option: Option, mesh: Mesh) -> Work:
    """The work of a product of two operands that is summed, or of an attention, on one rank."""
    if rule is not None and is_attention(node):
        return _attention_work(rule, option, mesh)
    factors = factors_of_product(node, rule)
    if rule is None or factors is None:
        return Work()
    (left, right), made = factors, rule.made

    def size(those: frozenset[str]) -> float:
        return math.prod(_local_size(rule, option, factor, mesh) for factor in those)

    under, over = size(left - right - made), size(made - left - right)
    # A window moves over the space of its input, of which there is one result each, or one input where it is spread.
    window = min(under, over) if made - left - right else under
    own = rows_share(node)
    return Work(2.0 * size((left & (right | made)) | right) * window * own, size((made & left) - right) * own)


def _attention_work(rule: Rule, option: Option, mesh: Mesh) -> Work:
    """Of scores and their product with the values: causal ones have half the FLOPs, at half the rate."""
    query, keys, values = ({factor for dim in term for factor in dim} for term in rule.pattern.inputs[:3])
    spaces = query | keys, rule.made | values
    counts = (math.prod(_local_size(rule, option, factor, mesh) for factor in space) for space in spaces)
    return Work(2.0 * sum(counts), math.inf)


def _local_size(rule: Rule, option: Option, factor: str, mesh: Mesh) -> float:
    cut = option.cuts.get(factor)
    return sym_hint(rule.extent[factor]) / (mesh.size(cut.axes) if cut is not None else 1)
