"""The cost of a choice, in seconds of one call on one rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import fx

from tpcompiler._torch import sym_hint
from tpcompiler.cost.fusion import Kernel, factors_of_product, is_attention, rows_share
from tpcompiler.cost.machine import Machine
from tpcompiler.cost.path import FREE, Step, steps_between
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.sharding import Sharding
from tpcompiler.rules.infer import Option
from tpcompiler.rules.notation import Rule
from tpcompiler.runtime.records import Optimizer

STEP = 1e-12  # seconds: the choice with fewer collectives wins a tie
TIE = 1e-3  # of the time to read a byte: the choice that holds or touches fewer bytes wins a tie
LEAST = 2e-9  # seconds: to save few held bytes, a small matrix is worth an extra collective; a vector is not
COPIES = {"slice": 3, "all_to_all": 2}  # ops of a step that copies (default 1); a slice also creates its indices
VIEWS = 3  # around each copy, such as those of the ranks' dim that a gather adds, moves and merges


class Work(NamedTuple):
    """The FLOPs of a rank's part of an op, and the rows of its product."""

    flops: float = 0.0
    rows: float = 0.0


class Objective(NamedTuple):
    """The predicted time of one call on a machine, on the busiest rank.

    Products, attentions and other kernels take their floor plus the longer of two times: for their FLOPs, and for the
    bytes that they move (the roofline of Williams, Waterman and Patterson, 2009). A collective takes the fastest of its
    links. Without a compiler, copies before and after a collective are kernels too.

    Attributes:
        byte_price: seconds that a byte of weights is worth; a tiny value only breaks ties.
        calls: the weights of one call of each of several programs placed together; all 1 by default.
        optimizer: whose state ranks hold next to parameters with gradients.
    """

    machine: Machine
    byte_price: float
    calls: tuple[float, ...] = ()
    optimizer: Optimizer = "adamw"

    @classmethod
    def of(
        cls,
        machine: Machine,
        byte_price: float | None = None,
        calls: tuple[float, ...] = (),
        optimizer: Optimizer = "adamw",
    ) -> Objective:
        """Return the objective; by default `byte_price` is a small share of the time to read a byte of weights."""
        price = TIE / machine.memory_bandwidth if byte_price is None else byte_price
        return cls(machine, price, calls, optimizer=optimizer)

    def weight(self, program: int) -> float:
        """Return the weight of one call of a program."""
        return self.calls[program] if self.calls else 1.0

    def change_seconds(self, source: Sharding, target: Sharding, value: torch.Tensor, mesh: Mesh) -> float:
        """Return the seconds of a change of sharding: its collectives and its copies."""
        steps = steps_between(source, target, value.shape, value.element_size(), mesh, self.machine)
        sent = [step for step in steps if step.kind not in FREE]
        collective = self.machine.collective_seconds
        seconds = sum(collective(step.kind, step.axes, step.wire_bytes, mesh) + STEP for step in sent)
        return seconds + self.copy_seconds(steps, value, mesh)

    def copy_seconds(self, steps: Sequence[Step], value: torch.Tensor, mesh: Mesh) -> float:
        """Return the seconds of the copies in a change's steps; a compiler fuses them with the ops around."""
        seconds = 0.0
        for step in () if self.machine.fuses else steps:
            if count := copied_bytes(step, value, mesh):
                seconds += COPIES.get(step.kind, 1) * self.machine.other + VIEWS * self.machine.view
                seconds += count / self.machine.bandwidth_of(stored=False)
        return seconds

    def floor_seconds(self, kernel: Kernel) -> float:
        """Return the floor of the kernel that an op starts, in seconds."""
        machine = self.machine.of(kernel.dtype)
        floors = {"product": machine.product, "attention": machine.attention, "other": machine.other}
        return {"": 0.0, "view": machine.view, **floors}[kernel.floor]

    def work_seconds(
        self, kernel: Kernel, work: Work, values: Sequence[tuple[torch.Tensor, Sharding]], mesh: Mesh
    ) -> float:
        """Return the longer of the times for an op's FLOPs and for its bytes on the first rank, the busiest.

        Args:
            values: operands, then results.
        """
        machine, memory_seconds = self.machine.of(kernel.dtype), 0.0
        for share, stored, (value, sharding) in zip(kernel.moves, kernel.stored, values, strict=bool(kernel.moves)):
            if share:
                memory_seconds += share * _stored_bytes(value, sharding, mesh) / machine.bandwidth_of(stored)
        return max(work.flops / machine.flops_of(work.rows), memory_seconds)

    def tie_seconds(self, values: Sequence[tuple[torch.Tensor, Sharding]], mesh: Mesh) -> float:
        """Return a tiny cost of touched bytes, so that of equally fast choices the one on fewer bytes wins."""
        count = sum(local_bytes(*value, mesh) for value in values)
        return TIE * count / self.machine.memory_bandwidth

    def storage_seconds(self, count: float) -> float:
        """Return the value of holding so many bytes of weights less."""
        return self.byte_price * count


def copied_bytes(step: Step, value: torch.Tensor, mesh: Mesh) -> int:
    """Return the bytes read and written to slice a value, or to order a collective's data along an inner dim."""
    source, target = (local_bytes(value, sharding, mesh) for sharding in (step.source, step.target))
    dims = [
        dim for dim, (have, want) in enumerate(zip(step.source.dims, step.target.dims, strict=True)) if have != want
    ]
    is_inner = any(dim > 0 for dim in dims) or step.copied > 0
    copies = {"slice": target}
    if step.kind == "all_to_all" and any(step.target.dims[dim].spans for dim in dims):
        copies["all_to_all"] = target  # only the edges are sent
    elif step.kind == "all_to_all":
        sent, received = (
            next(dim for dim in dims if len(end.dims[dim].axes) > len(other.dims[dim].axes))
            for end, other in ((step.target, step.source), (step.source, step.target))
        )
        is_even = step.source.is_even(value.shape, mesh) and step.target.is_even(value.shape, mesh)
        copies["all_to_all"] = source * (sent > 0) + target * (received > 0) if is_even else 2 * source + target
    if is_inner:
        copies |= {"all_gather": target, "reduce_scatter": source}
    return 2 * copies.get(step.kind, 0)


def local_bytes(value: torch.Tensor, sharding: Sharding, mesh: Mesh, rank: int | None = None) -> int:
    """Return the bytes on a rank, or on the one that holds most."""
    return sharding.local_bytes(tuple(map(sym_hint, value.shape)), value.element_size(), mesh, rank)


def _stored_bytes(value: torch.Tensor, sharding: Sharding, mesh: Mesh) -> int:
    """Return the local bytes in memory, where an expanded dim occurs once."""
    stored = [dim for dim, stride in enumerate(value.stride()) if sym_hint(stride)]
    sizes = tuple(sym_hint(value.shape[dim]) for dim in stored)
    return Sharding(tuple(sharding.dims[dim] for dim in stored)).local_bytes(sizes, value.element_size(), mesh)


def local_work(node: fx.Node, rule: Rule | None, option: Option, mesh: Mesh) -> Work:
    """Return one rank's work in a summed product of two operands, or in an attention."""
    if rule is not None and is_attention(node):
        return _attention_work(rule, option, mesh)
    factors = factors_of_product(node, rule)
    if rule is None or factors is None:
        return Work()
    (left, right), outputs = factors, rule.made

    def size(those: frozenset[str]) -> float:
        return math.prod(_local_size(rule, option, factor, mesh) for factor in those)

    under, over = size(left - right - outputs), size(outputs - left - right)
    # A window slides over the input's space: one result per position, or one input if the window spreads it.
    window = min(under, over) if outputs - left - right else under
    own = rows_share(node)
    return Work(2.0 * size((left & (right | outputs)) | right) * window * own, size((outputs & left) - right) * own)


def _attention_work(rule: Rule, option: Option, mesh: Mesh) -> Work:
    """Return the work of scores and their product with the values; causal ones halve both FLOPs and rate."""
    query, keys, values = ({factor for dim in term for factor in dim} for term in rule.pattern.inputs[:3])
    spaces = query | keys, rule.made | values
    counts = (math.prod(_local_size(rule, option, factor, mesh) for factor in space) for space in spaces)
    return Work(2.0 * sum(counts), math.inf)


def _local_size(rule: Rule, option: Option, factor: str, mesh: Mesh) -> float:
    size = sym_hint(rule.extent[factor])
    cut = option.cuts.get(factor)
    return float(size if cut is None else cut.local_size(size, mesh, mesh.coordinate(0)))
