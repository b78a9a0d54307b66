"""What a choice costs, in seconds of one call on one rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import torch
from torch import fx

from tpcompiler._torch import sym_hint
from tpcompiler.cost.kernels import Kernel, factors_of_product, is_attention, rows_share
from tpcompiler.cost.machine import Machine
from tpcompiler.cost.path import FREE, Step, steps_between
from tpcompiler.ir.dim_sharding import Size
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.sharding import Sharding
from tpcompiler.rules.infer import Option
from tpcompiler.rules.notation import Rule

STEP = 1e-12  # seconds: of equals, the one with fewer collectives
TIE = 1e-3  # of the time to read a byte: of equals, the one that holds or looks at fewer
LEAST = 2e-9  # seconds: where few bytes are to be held, a small matrix is worth more than a collective; a vector is not
COPIES = {"slice": 3, "all_to_all": 4}  # ops of a step that copies: a slice makes its indices; by default one
VIEWS = 3  # around it, such as of the ranks' dim that a gather makes, moves and merges


class Work(NamedTuple):
    """FLOPs of a rank's part of an op, and the rows of its product."""

    flops: float = 0.0
    rows: float = 0.0


class Objective(NamedTuple):
    """The predicted time of one call on a machine, on the rank that does most.

    Products, attentions and other kernels take their floor and the longer of two times: for their FLOPs, and for the
    bytes that they move (the roofline of Williams, Waterman and Patterson, 2009). A collective takes the fastest of
    its links. Without a compiler, copies before and after it are kernels too.

    Attributes:
        held: seconds that a byte of weights is worth; next to nothing breaks ties.
        calls: of programs that are placed together, how much a call of each counts; by default all count 1.
        spread: ranks of the axes that are left out, over which everything counts as cut for free: for a bound.
    """

    machine: Machine
    held: float
    calls: tuple[float, ...] = ()
    spread: int = 1

    @classmethod
    def of(cls, machine: Machine, held: float | None = None, calls: tuple[float, ...] = ()) -> Objective:
        """`held`: by default a small share of the time to read a byte of weights."""
        return cls(machine, TIE / machine.memory_bandwidth if held is None else held, calls)

    def weight(self, program: int) -> float:
        """How much a call of a program counts."""
        return self.calls[program] if self.calls else 1.0

    def change_seconds(self, source: Sharding, target: Sharding, value: torch.Tensor, mesh: Mesh) -> float:
        """Seconds of a change of sharding: of its collectives, and of the copies that it makes."""
        steps = steps_between(source, target, value.shape, value.element_size(), mesh, self.machine)
        sent = sum(self._step_seconds(step, mesh) + STEP for step in steps if step.kind not in FREE)
        return sent + self.copy_seconds(steps, value, mesh)

    def _step_seconds(self, step: Step, mesh: Mesh) -> float:
        """Of a collective; for a bound, also as a part of one over more axes."""
        rest = [axis for axis in mesh.names if axis not in step.axes] if self.spread > 1 else []
        groups = (mesh.ordered({*step.axes, *more}) for n in range(len(rest) + 1) for more in combinations(rest, n))
        count = step.wire_bytes / self.spread
        return min(self.machine.collective_seconds(step.kind, axes, count, mesh) for axes in groups)

    def copy_seconds(self, steps: Sequence[Step], value: torch.Tensor, mesh: Mesh) -> float:
        """Seconds of the copies that steps of a change make; a compiler fuses them with the ops around."""
        seconds = 0.0
        for step in () if self.machine.fuses else steps:
            if count := copied_bytes(step, value, mesh):
                seconds += COPIES.get(step.kind, 1) * self.machine.other + VIEWS * self.machine.view
                seconds += count / self.machine.bandwidth_of(stored=False)
        return seconds / self.spread

    def floor_seconds(self, kernel: Kernel) -> float:
        """What the kernel takes that an op begins, whatever the op's size."""
        machine = self.machine.of(kernel.dtype)
        floors = {"product": machine.product, "attention": machine.attention, "other": machine.other}
        return {"": 0.0, "view": machine.view, **floors}[kernel.floor]

    def work_seconds(
        self, kernel: Kernel, work: Work, values: Sequence[tuple[torch.Tensor, Sharding]], mesh: Mesh
    ) -> float:
        """Return the longer of the times for an op's FLOPs and for its bytes on the first rank, which does most.

        Args:
            values: operands, then results.
        """
        machine, moved = self.machine.of(kernel.dtype), 0.0
        for share, stored, (value, sharding) in zip(kernel.moves, kernel.stored, values, strict=bool(kernel.moves)):
            if share:
                moved += share * _stored_bytes(value, sharding, mesh) / machine.bandwidth_of(stored)
        return max(work.flops / machine.flops_of(work.rows), moved) / self.spread

    def tie_seconds(self, values: Sequence[tuple[torch.Tensor, Sharding]], mesh: Mesh) -> float:
        """Of ways that take as long, such as a view before a change or after it, the one on fewer bytes wins."""
        count = sum(local_bytes(*value, mesh) for value in values) / self.spread
        return TIE * count / self.machine.memory_bandwidth

    def held_seconds(self, count: float) -> float:
        """What it is worth to hold so many bytes of weights less."""
        return self.held * count / self.spread


def copied_bytes(step: Step, value: torch.Tensor, mesh: Mesh) -> int:
    """Bytes read and written to cut a value, or to order what a collective sends or brings along an inner dim."""
    source, target = (local_bytes(value, sharding, mesh) for sharding in (step.source, step.target))
    dims = [
        dim for dim, (have, want) in enumerate(zip(step.source.dims, step.target.dims, strict=True)) if have != want
    ]
    is_inner = any(dim > 0 for dim in dims)
    copied = {"slice": target, "all_to_all": 2 * source + target}  # which takes parts of the source apart in two steps
    if is_inner:
        copied |= {"all_gather": target, "reduce_scatter": source}
    return 2 * copied.get(step.kind, 0)


def local_bytes(value: torch.Tensor, sharding: Sharding, mesh: Mesh) -> int:
    """Of the first rank, which holds most."""
    return _count(_local_shape(value, sharding, mesh)) * value.element_size()


def _stored_bytes(value: torch.Tensor, sharding: Sharding, mesh: Mesh) -> int:
    """The same of what memory holds: an expanded dim is there once."""
    pairs = zip(_local_shape(value, sharding, mesh), value.stride(), strict=True)
    return _count([size for size, stride in pairs if sym_hint(stride)]) * value.element_size()


def _local_shape(value: torch.Tensor, sharding: Sharding, mesh: Mesh) -> Sequence[Size]:
    return sharding.local_shape([sym_hint(size) for size in value.shape], mesh, mesh.coordinate(0))


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
