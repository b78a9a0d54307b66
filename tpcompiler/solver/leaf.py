"""The possible shardings of a leaf, as its constraint and its uses give them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tpcompiler.ir.constraints import Allowed, AnyStyle, Dims, Exactly
from tpcompiler.ir.dim_sharding import DimSharding
from tpcompiler.ir.sharding import Sharding
from tpcompiler.solver.stage import Stage


@dataclass
class Leaf:
    """A tensor of the model, whatever names and programs share it, and its possible shardings so far.

    `is_followed`: values are placed as it is, as it is written or has a gradient. `before`: its sharding over the axes
    before. `shardings`: empty for one that takes the sharding that its uses want.
    """

    group: str
    allowed: Allowed
    is_followed: bool
    before: Sharding
    value: torch.Tensor
    has_gradient: bool = False
    shardings: dict[Sharding, None] = field(default_factory=dict)

    @property
    def is_fixed(self) -> bool:
        """True if a constraint places it."""
        return isinstance(self.allowed, Exactly | Dims)

    @property
    def within(self) -> Exactly | Dims | None:
        """The plan's entry for it, if that only narrows what the search may find."""
        return self.allowed.within if isinstance(self.allowed, AnyStyle) else None

    def start(self, stage: Stage) -> None:
        """Let it be what its constraint names, or as before if other values are placed as it is."""
        if isinstance(self.allowed, Exactly | Dims):
            is_whole = isinstance(self.allowed, Exactly) and len(self.allowed.shardings) == 1  # over all axes
            for asked in self.allowed.shardings:
                sharding = asked if is_whole else asked.only(stage.axis).beside(self.before, {stage.axis})
                self.shardings.setdefault(stage.within(sharding, self.value))
        elif self.is_followed:
            self.let_be_whole()
        if stage.gathers:  # whole, or cut evenly along any dim, whatever its uses want
            self.let_be_whole()
            for dim, size in enumerate(self.value.shape if self.value.is_floating_point() else ()):
                cut = self.before.dims[dim].inside(DimSharding.by(stage.axis))
                if cut.is_even(size, stage.mesh):
                    self.shardings.setdefault(self.before.settled().with_dim(dim, cut))

    def want(self, sharding: Sharding, stage: Stage) -> None:
        """Let it be what a use wants, if its constraint leaves that open."""
        earlier = sharding.within(stage.axes[:-1], self.value.shape, stage.mesh)
        if sharding.partial or earlier != self.before:
            return
        is_open = not self.is_fixed and self.is_followed
        if is_open or (isinstance(self.allowed, Dims) and self.allowed.admits(sharding, stage.axis)):
            self.shardings.setdefault(sharding)

    def may_be(self, sharding: Sharding, stage: Stage) -> bool:
        """Return True unless the plan excludes a sharding; on a half of an axis, a style lets it be whole too."""
        within = self.within
        if within is None or not stage.is_searched or within.admits(sharding, stage.axis):
            return True
        halves = within.shardings[0].axes - {stage.axis}
        is_other = bool(halves - set(stage.axes) or halves & self.before.axes)
        return isinstance(within, Dims) and is_other and not sharding.dims_cut_by(stage.axis)

    def let_be_whole(self) -> None:
        self.shardings.setdefault(self.before)
