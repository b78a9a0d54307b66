"""How one tensor is laid out over the mesh, dim by dim.

torch writes a tuple of placements, one per mesh axis. That cannot say "whole heads of 4 elements", or "the heads of
every batch row in a dim of batch * heads", so the nouns here are per tensor dim: which axes cut it, in which unit, and
in which blocks. Torch's form is read at the boundary and printed where it is the whole truth.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from tpcompiler._torch import sym_quotient
from tpcompiler.errors import ShardingError, UnsupportedError
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.placements import PlacementSpec, format_placement

Size = Any  # int or torch.SymInt; torch's own stubs do not unite them


def chunk(size: Size, degree: int, index: int, unit: int = 1) -> tuple[Size, Size]:
    """Offset and size of chunk `index` when `size` elements are dealt in whole units, the first ranks first.

    Follows `torch.chunk`: every chunk has ceil(units / degree) units until they run out, so the last ones may be
    smaller or empty. A symbolic size is one that `degree` units divide (`divides`).
    """
    if not isinstance(size, int):
        return size // degree * index, size // degree
    step = -(-(size // unit) // degree) * unit
    start = min(index * step, size)
    return start, min(start + step, size) - start


def divides(size: Size, pieces: int) -> bool:
    """Whether a size is a multiple of `pieces` in every run."""
    return sym_quotient(size, pieces) is not None


@dataclass(frozen=True)
class DimSharding:
    """How one tensor dim is cut: by these mesh axes, outermost first, between units of `unit` elements.

    With a `block` the dim is a row of blocks of that many elements, each of them cut so (0: the dim is one block).
    """

    axes: tuple[str, ...] = ()
    unit: int = 1
    block: int = 0

    def blocks(self, size: Size) -> Size:
        """How many blocks a dim of `size` elements has."""
        return size // self.block if self.block else 1

    def share(self, size: Size, mesh: Mesh, coordinate: Mapping[str, int]) -> tuple[Size, Size]:
        """(offset, size) of the shard at `coordinate` in each block of a dim of `size` elements."""
        offset: Size = 0
        size = self.block or size
        for axis in self.axes:
            start, size = chunk(size, mesh.degree(axis), coordinate[axis], self.unit)
            offset = offset + start
        return offset, size

    def local_size(self, size: Size, mesh: Mesh, coordinate: Mapping[str, int]) -> Size:
        return self.blocks(size) * self.share(size, mesh, coordinate)[1]

    def is_even(self, size: Size, mesh: Mesh) -> bool:
        """Whether every rank holds equally many elements."""
        pieces = math.prod(mesh.degree(axis) for axis in self.axes) * self.unit
        return not self.axes or divides(self.block or size, pieces)


WHOLE = DimSharding()


@dataclass(frozen=True)
class Sharding:
    """The layout of one tensor: a `DimSharding` per tensor dim, and at most one pending reduction per axis."""

    dims: tuple[DimSharding, ...]
    partial: tuple[tuple[str, str], ...] = ()  # (axis, reduce op), sorted by axis

    @classmethod
    def replicated(cls, ndim: int) -> Sharding:
        return cls((WHOLE,) * ndim)

    @classmethod
    def of(cls, spec: PlacementSpec, mesh: Mesh, ndim: int, what: str, asked_by: str = "") -> Sharding:
        """Read placements for a tensor of order `ndim`; `what` and `asked_by` name it in errors.

        Raises:
            ShardingError: an unknown axis, or a dim that the tensor does not have.
        """
        by_axis: Mapping[str, Placement]
        if isinstance(spec, Mapping):
            by_axis = spec
        elif len(mesh.axes) == 1:
            by_axis = {mesh.names[0]: spec}
        else:
            raise ShardingError(
                f"{what} has one placement, {format_placement(spec)}, on a mesh of {len(mesh.axes)} axes ({mesh})",
                help="give one placement per axis, {axis: placement}",
                asked_by=asked_by,
            )
        dims = [WHOLE] * ndim
        partial = []
        for axis in sorted(by_axis, key=lambda a: mesh.names.index(a) if a in mesh.names else -1):
            placement = by_axis[axis]
            if axis not in mesh.names:
                raise ShardingError(
                    f"{what} names mesh axis {axis!r}, which the mesh ({mesh}) does not have",
                    help=f"use one of {', '.join(mesh.names)}",
                    asked_by=asked_by,
                )
            if type(placement) is Shard:
                if not -ndim <= placement.dim < ndim:
                    raise ShardingError(
                        f"cannot shard {what} on dim {placement.dim}: it has {ndim} dims",
                        help=f"use a dim from {-ndim} to {ndim - 1}" if ndim else "pin it to R",
                        asked_by=asked_by,
                    )
                dim = placement.dim % ndim
                dims[dim] = replace(dims[dim], axes=(*dims[dim].axes, axis))
            elif type(placement) is Partial:
                partial.append((axis, placement.reduce_op))
            elif type(placement) is not Replicate:
                raise UnsupportedError(
                    f"placement {placement} of {what} is not supported", help="use R, S(dim) or P(op)"
                )
        return cls(tuple(dims), tuple(sorted(partial)))

    @property
    def ndim(self) -> int:
        return len(self.dims)

    @property
    def axes(self) -> frozenset[str]:
        """Every axis on which the tensor is not replicated."""
        return frozenset(a for dim in self.dims for a in dim.axes) | {axis for axis, _ in self.partial}

    @property
    def is_replicated(self) -> bool:
        return not self.axes

    def permuted(self, order: Sequence[int]) -> Sharding:
        """The sharding of `tensor.permute(order)`."""
        return Sharding(tuple(self.dims[dim] for dim in order), self.partial)

    def settled(self) -> Sharding:
        """The same cut with every pending reduction done."""
        return Sharding(self.dims)

    def local_shape(self, shape: Sequence[Size], mesh: Mesh, coordinate: Mapping[str, int]) -> tuple[Size, ...]:
        return tuple(dim.local_size(size, mesh, coordinate) for dim, size in zip(self.dims, shape, strict=True))

    def is_even(self, shape: Sequence[Size], mesh: Mesh) -> bool:
        """Whether every rank holds a shard of the same shape."""
        return all(dim.is_even(size, mesh) for dim, size in zip(self.dims, shape, strict=True))

    def placements(self, mesh: Mesh) -> tuple[Placement, ...]:
        """torch's form, one placement per mesh axis (units and blocks are not expressible there)."""
        out: list[Placement] = []
        partial = dict(self.partial)
        for axis in mesh.names:
            dim = next((d for d, cut in enumerate(self.dims) if axis in cut.axes), None)
            out.append(Shard(dim) if dim is not None else Partial(partial[axis]) if axis in partial else Replicate())
        return tuple(out)

    def text(self, mesh: Mesh) -> str:
        """`S(1)` on one axis, `[S(0), R]` on several; beside what torch cannot say: `S(2, unit 4, block 24)`."""
        parts = []
        for placement in self.placements(mesh):
            part = format_placement(placement)
            if type(placement) is Shard:
                dim = self.dims[placement.dim]
                said = [f"{name} {n}" for name, n in (("unit", dim.unit), ("block", dim.block)) if n > 1]
                part = f"S({', '.join([str(placement.dim), *said])})"
            parts.append(part)
        return parts[0] if len(parts) == 1 else f"[{', '.join(parts)}]"
