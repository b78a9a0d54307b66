"""Constraints on leaves and values: the shardings that the plan, the boundary and the search allow, and who asked.

A parameter may also be held in shards between its uses: each use gathers it, each gradient is scattered. That is the
fully sharded data parallelism of Zhao et al., PyTorch FSDP (2023), after ZeRO (Rajbhandari et al., 2020).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tpcompiler.ir.dim_sharding import DimSharding, Size
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.sharding import Sharding, refuse_mixed


@dataclass(frozen=True)
class Exactly:
    """One of these shardings; of several, each axis may take its part from another one."""

    shardings: tuple[Sharding, ...]

    def admits(self, sharding: Sharding, axis: str) -> bool:
        """Return True for one of the shardings over `axis`; a whole leaf may also be a pending sum."""
        return any(sharding.without_partial.axis_part(axis) == each.axis_part(axis) for each in self.shardings)


@dataclass(frozen=True)
class Dims:
    """The dims that one of these shardings cuts, by its axes; units, blocks and parts follow from the uses.

    `needs_parts`: the uses must reveal parts.
    """

    shardings: tuple[Sharding, ...]
    needs_parts: bool = False

    def admits(self, sharding: Sharding, axis: str) -> bool:
        """Return True if `axis` cuts the dims that it cuts in one of the shardings."""
        return any(sharding.dims_cut_by(axis) == each.dims_cut_by(axis) for each in self.shardings)


@dataclass(frozen=True)
class Over:
    """The sharding over these axes; over the others a value stays as it is."""

    shardings: tuple[Sharding, ...]
    axes: tuple[str, ...]


@dataclass(frozen=True)
class AnyStyle:
    """Whatever the search finds, within the plan's entry for the leaf if there is one.

    `gathers`: a weight may be gathered at run time, and the batch may be cut.
    """

    within: Exactly | Dims | None = None
    gathers: bool = False


@dataclass(frozen=True)
class AsUsed:
    """Whatever the uses of the leaf want."""


Allowed = Exactly | Dims | Over | AnyStyle | AsUsed


@dataclass(frozen=True)
class Constraint:
    """The shardings of a leaf or an input (`PlannedProgram.constraints`), or of a value (meta[PIN] of a `pin` node).

    Attributes:
        asked_by: the plan's entry, or the argument.
        leaf: the FQN of a leaf; empty for an input or a value.
    """

    allowed: Allowed
    asked_by: str
    leaf: str = ""

    @property
    def request(self) -> Exactly | Dims | Over | None:
        """The request of the plan or the caller; None if the search or the uses decide."""
        allowed = self.allowed.within if isinstance(self.allowed, AnyStyle) else self.allowed
        return None if isinstance(allowed, AsUsed) else allowed

    @property
    def sharding(self) -> Sharding:
        """The first of the requested shardings."""
        assert self.request is not None
        return self.request.shardings[0]

    @property
    def is_fixed(self) -> bool:
        """True if the placement comes from here, and not from the search or the uses."""
        return isinstance(self.allowed, Exactly | Dims)

    @property
    def narrows(self) -> bool:
        """True if the search places the leaf, and this only excludes some of its choices."""
        return isinstance(self.allowed, AnyStyle)

    def apply(self, have: Sharding) -> Sharding:
        """Return the sharding of a value that was placed as `have`.

        Raises:
            ShardingError: reductions pending over other axes do not commute with its own.
        """
        target = self.sharding.nest_in(have, self.allowed.axes) if isinstance(self.allowed, Over) else self.sharding
        refuse_mixed(target.partial, "a value", self.asked_by)
        return target

    def widened(self, others: tuple[Sharding, ...]) -> Constraint:
        """Return a constraint that also allows these shardings."""
        assert isinstance(self.allowed, Exactly | Dims)
        return replace(self, allowed=replace(self.allowed, shardings=(*self.allowed.shardings, *others)))

    def split_axis(self, axis: str, both: Sequence[str]) -> Constraint:
        """Return the same constraint on a mesh that has the axes `both` instead of `axis`."""
        shardings = tuple(each.split_axis(axis, both) for each in self.request.shardings) if self.request else ()
        match self.allowed:
            case Exactly() | Dims() as allowed:
                return replace(self, allowed=replace(allowed, shardings=shardings))
            case AnyStyle(within) if within is not None:
                return replace(self, allowed=AnyStyle(replace(within, shardings=shardings)))
            case Over(_, axes):
                split = tuple(name for old in axes for name in (both if old == axis else (old,)))
                return replace(self, allowed=Over(shardings, split))
        return self


@dataclass(frozen=True)
class AtRest:
    """A request that ranks along `axis` each hold a share of a parameter."""

    axis: str
    asked_by: str

    def apply(self, used: Sharding, shape: Sequence[Size], mesh: Mesh) -> Sharding:
        """Return the sharding at rest of a parameter that its uses want as `used`.

        The axis cuts the first dim that it cuts evenly, inside of what cuts the dim already; none if it cuts no dim so.
        """
        parts = mesh.parts_of(self.axis)
        for dim, (cut, size) in enumerate(zip(used.dims, shape, strict=True)):
            if used.axes.isdisjoint(parts) and not cut.parts and not cut.block:
                inner = cut.nest(DimSharding.by(*parts))
                if inner.is_even(size, mesh):
                    return used.with_dim(dim, inner)
        return used
