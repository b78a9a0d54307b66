"""Collectives and their bytes: the payload that the call names, and the ring wire bytes per rank that follow.

Ring algorithms as in Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH"
(2005): with n ranks and a payload of M bytes an all_reduce sends 2 (n - 1) / n M per rank; an all_gather (M = what is
gathered), a reduce_scatter (M = what is reduced) and an all_to_all (M = what a rank holds) send (n - 1) / n M.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from tpcompiler._torch import sym_hint
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.sharding import Sharding, Size

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def wire_bytes(kind: str, payload: int, group_size: int) -> int:
    """Bytes that each rank sends, on a ring of `group_size` ranks."""
    share = payload * (group_size - 1) / group_size
    return round(2 * share if kind == "all_reduce" else share)


def reshard_wire_bytes(source: Sharding, target: Sharding, shape: Sequence[Size], itemsize: int, mesh: Mesh) -> int:
    """Wire bytes per rank of one change of sharding; symbolic sizes count as in the example."""
    total = 0
    whole = prod(sym_hint(size) for size in shape) * itemsize
    reductions, kept = dict(source.partial), dict(target.partial)
    cut_before = {axis: d for d, dim in enumerate(source.dims) for axis in dim.axes}
    cut_after = {axis: d for d, dim in enumerate(target.dims) for axis in dim.axes}
    for axis, degree in mesh.axes:
        if axis in reductions and kept.get(axis) != reductions[axis]:
            total += wire_bytes("reduce_scatter" if axis in cut_after else "all_reduce", whole, degree)
        elif axis in cut_before:
            before, after = cut_before[axis], cut_after.get(axis)
            if after is None or (after == before and source.dims[before] != target.dims[after]):
                total += wire_bytes("all_gather", whole, degree)  # other units or blocks: through the whole tensor
            elif after != before:
                total += wire_bytes("all_to_all", -(-whole // degree), degree)
    return total
