"""What a choice costs, in seconds of one call on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from tpcompiler._torch import sym_hint
from tpcompiler.cost.path import steps_between
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.sharding import Sharding, Size


class Machine(NamedTuple):
    """Of one device: FLOP/s, bytes/s of its memory, and bytes/s that it sends."""

    flops: float
    memory: float
    link: float


H100 = Machine(
    flops=989e12, memory=3.35e12, link=450e9
)  # dense bfloat16, HBM3, NVLink 4 in one direction: NVIDIA's sheet
STEP = 5e-9  # of each step: about 2 KB on the link, so that fewer collectives win where bytes are nearly the same


def change_seconds(source: Sharding, target: Sharding, value: torch.Tensor, mesh: Mesh, machine: Machine) -> float:
    """Of a change of sharding: its wire bytes, and next to nothing for each step."""
    steps = steps_between(source, target, value.shape, value.element_size(), mesh)
    return sum(step.wire_bytes for step in steps) / machine.link + STEP * len(steps)


def compute_seconds(
    flops: float, values: Sequence[tuple[torch.Tensor, Sharding]], mesh: Mesh, machine: Machine
) -> float:
    """Of an op by the roofline (Williams, Waterman and Patterson, 2009): FLOPs of the largest share, or bytes moved."""
    moved = sum(local_bytes(value, sharding, mesh) for value, sharding in values)
    return max(flops / machine.flops, moved / machine.memory)


def held_seconds(count: float, machine: Machine) -> float:
    """What it is worth to hold so many bytes of weights less: as much as to send them once.

    One call of a program is no measure of what weights cost: they are read in every step, and must fit.
    """
    return count / machine.link


def local_bytes(value: torch.Tensor, sharding: Sharding, mesh: Mesh) -> int:
    """Of the first rank, which holds most."""
    shape = [sym_hint(size) for size in value.shape]
    return _count(sharding.local_shape(shape, mesh, mesh.coordinate(0))) * value.element_size()


def _count(shape: Sequence[Size]) -> int:
    total = 1
    for size in shape:
        total *= sym_hint(size)
    return total
