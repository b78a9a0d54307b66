"""Cuts of one dim, drawn at random: nested axes, units, blocks and parts."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from tpcompiler.ir.dim_sharding import DimSharding
from tpcompiler.ir.mesh import Mesh

GRID = Mesh((("dp", 2), ("tp", 3)))
Cut = tuple[int, DimSharding]


def divisors(size: int) -> list[int]:
    return [n for n in range(1, size + 1) if size % n == 0]


@st.composite
def levels(draw: st.DrawFn, size: int, axes: Sequence[str]) -> DimSharding:
    """A cut of `size` elements by these axes, between units, in blocks or not."""
    if not axes:
        return DimSharding()
    block = draw(st.sampled_from([0, *divisors(size)[:-1]]))
    return DimSharding.by(*axes, block=block, unit=draw(st.sampled_from(divisors(block or size))))


@st.composite
def cuts(draw: st.DrawFn, mesh: Mesh = GRID) -> Cut:
    """The size of a dim and how it is cut."""
    order = draw(st.permutations(mesh.names))
    made = []
    for size in draw(st.lists(st.integers(1, 12), min_size=1, max_size=3)):
        own = draw(st.sets(st.sampled_from(order)))
        made.append((size, draw(levels(size, [axis for axis in order if axis in own]))))
    return sum(size for size, _ in made), DimSharding.of_parts(made)
