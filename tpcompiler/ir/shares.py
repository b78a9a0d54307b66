"""Cut a whole tensor into the shares of ranks, and put shares together again."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import torch

from tpcompiler.ir.local import local_strides
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.placements import parse_placement
from tpcompiler.ir.sharding import DimSharding, Sharding

REDUCE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda stacked: stacked.sum(0, dtype=stacked.dtype),
    "avg": lambda stacked: stacked.sum(0, dtype=stacked.dtype) / stacked.shape[0],
    "product": lambda stacked: stacked.prod(0, dtype=stacked.dtype),
    "max": lambda stacked: stacked.amax(0),
    "min": lambda stacked: stacked.amin(0),
}


def cut(value: torch.Tensor, sharding: Sharding, mesh: Mesh, rank: int) -> torch.Tensor:
    """The share of `rank`, dense in the dim order of the whole (a replica is the whole tensor itself).

    A pending sum (product) is held by the first rank of its axis, zeros (ones) elsewhere.
    """
    if sharding.is_replicated:
        return value
    here, whole = mesh.coordinate(rank), value
    for dim, by in enumerate(sharding.dims):
        if by.axes:
            offset, size = by.share(value.shape[dim], mesh, here)
            rows = torch.unflatten(value, dim, (by.blocks(value.shape[dim]), by.block or value.shape[dim]))
            value = rows.narrow(dim + 1, offset, size).flatten(dim, dim + 1)
    for axis, op in sharding.partial:
        if here[axis] and op in ("sum", "product"):
            value = torch.full_like(value, 0 if op == "sum" else 1)
    strides = local_strides(whole, value.shape)
    return value if value.stride() == tuple(strides) else value.new_empty_strided(value.shape, strides).copy_(value)


def join(parts: Sequence[torch.Tensor], sharding: Sharding, mesh: Mesh, shape: Sequence[int]) -> list[torch.Tensor]:
    """Every whole tensor that the ranks' shares make: one per rank where they are replicas, one where they are shards.

    Raises:
        ValueError: shares whose shapes are not those of the sharding.
    """
    for rank, part in enumerate(parts):
        if tuple(part.shape) != sharding.local_shape(shape, mesh, mesh.coordinate(rank)):
            raise ValueError(f"rank {rank} holds {list(part.shape)} of {list(shape)} as {sharding.text(mesh)}")
    if sharding.is_replicated:
        return list(parts)
    if sharding.partial:
        ((_, op),) = sharding.partial
        return [REDUCE[op](torch.stack(list(parts)))]
    dim, by = next((d, by) for d, by in enumerate(sharding.dims) if by.axes)
    shares = [by.share(shape[dim], mesh, mesh.coordinate(rank))[1] for rank in range(len(parts))]
    rows = [torch.unflatten(part, dim, (by.blocks(shape[dim]), size)) for part, size in zip(parts, shares, strict=True)]
    return [torch.cat(rows, dim + 1).flatten(dim, dim + 1)]


def read_sharding(text: str, mesh: Mesh, ndim: int) -> Sharding:
    """Read back what `Sharding.text` printed, for a mesh of one axis."""
    found = re.fullmatch(r"S\((\d+)(?:, unit (\d+))?(?:, block (\d+))?\)", text)
    if found is None:
        return Sharding.of(parse_placement(text), mesh, ndim, "a value")
    dims = list(Sharding.replicated(ndim).dims)
    dims[int(found[1])] = DimSharding(mesh.names, int(found[2] or 1), int(found[3] or 0))
    return Sharding(tuple(dims))
