"""Parameters that ranks hold in shards between their uses: each use gathers them, each gradient is scattered.

The fully sharded data parallelism of Zhao et al., PyTorch FSDP (2023), after ZeRO (Rajbhandari et al., 2020).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tpcompiler.ir.dim_sharding import DimSharding, Size
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.sharding import Sharding


@dataclass(frozen=True)
class AtRest:
    """A request that ranks along `axis` each hold a share of a parameter."""

    axis: str
    asked_by: str

    def applied(self, used: Sharding, shape: Sequence[Size], mesh: Mesh) -> Sharding:
        """Return the sharding at rest of a parameter that its uses want as `used`.

        The axis cuts the first dim that it cuts evenly, inside of what cuts the dim already; none if it cuts no dim so.
        """
        parts = mesh.parts_of(self.axis)
        for dim, (cut, size) in enumerate(zip(used.dims, shape, strict=True)):
            if used.axes.isdisjoint(parts) and not cut.parts and not cut.block:
                inner = cut.inside(DimSharding.by(*parts))
                if inner.is_even(size, mesh):
                    return used.with_dim(dim, inner)
        return used
