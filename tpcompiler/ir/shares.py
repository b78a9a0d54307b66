"""Cut a whole tensor into the shares of ranks, and join shares again."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from tpcompiler.errors import ArtifactError, ShardingError, TpCompilerError
from tpcompiler.ir.dim_sharding import WHOLE, DimSharding, Size, chunk
from tpcompiler.ir.local import local_strides
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.placements import parse_placement
from tpcompiler.ir.sharding import Sharding
from tpcompiler.runtime.records import Manifest, PlacedRecord

REDUCE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda stacked: stacked.sum(0, dtype=stacked.dtype),
    "avg": lambda stacked: stacked.sum(0, dtype=stacked.dtype) / stacked.shape[0],
    "product": lambda stacked: stacked.prod(0, dtype=stacked.dtype),
    "max": lambda stacked: stacked.amax(0),
    "min": lambda stacked: stacked.amin(0),
}


NEUTRAL = {"sum": 0, "product": 1}  # held by the other ranks if one rank has the pending value


def cut(value: torch.Tensor, sharding: Sharding, mesh: Mesh, rank: int) -> torch.Tensor:
    """Return the share of `rank`, dense in the dim order of the whole (a replica is the whole tensor itself).

    The first rank of its axis holds a pending sum (product); the others hold zeros (ones).
    """
    if sharding.is_replicated:
        return value
    here, whole = mesh.coordinate(rank), value
    for dim, by in enumerate(sharding.dims):
        value = cut_dim(value, dim, by, mesh, here)
    for axis, op in sharding.partial:
        if here[axis] and op in NEUTRAL:
            value = torch.full_like(value, NEUTRAL[op])
    strides = local_strides(whole, value.shape)
    return value if value.stride() == tuple(strides) else value.new_empty_strided(value.shape, strides).copy_(value)


def cut_dim(
    value: torch.Tensor,
    dim: int,
    by: DimSharding,
    mesh: Mesh,
    coordinate: Mapping[str, int],
    narrow: Callable[[torch.Tensor, int, Any, Any], torch.Tensor] = torch.narrow,
) -> torch.Tensor:
    """Return the part of one dim at `coordinate`; a view if it is one piece and `narrow` returns a view."""
    if not by.axes:
        return value
    if by.parts:
        pieces = torch.split(value, [size for size, _ in by.parts], dim)
        parts = [cut_dim(p, dim, how, mesh, coordinate, narrow) for p, (_, how) in zip(pieces, by.parts, strict=True)]
        return torch.cat(parts, dim)
    size = value.shape[dim]
    if not any(level.block for level in by.levels):
        return narrow(value, dim, *by.share(size, mesh, coordinate))
    rows = torch.unflatten(value, dim, (-1 if size else 0, by.block)) if by.block else value.unsqueeze(dim)
    size = by.block or size
    for axis, block, unit in by.levels:
        if block and size != block:
            rows, size = torch.unflatten(rows.flatten(dim, dim + 1), dim, (-1 if size else 0, block)), block
        start, size = chunk(size, mesh.deals(axis), coordinate[axis], unit)
        rows = narrow(rows, dim + 1, start, size)
    return rows.flatten(dim, dim + 1)


def holders_of(sharding: Sharding, shape: Sequence[int], mesh: Mesh, rank: int) -> list[torch.Tensor]:
    """Return, for each dim, how many ranks hold each index of the share of `rank`.

    Parts in a row are over different axes: heads of queries may be cut, and the one of keys held by all ranks.
    """
    counts: list[torch.Tensor] = []
    for size, by in zip(shape, sharding.dims, strict=True):
        holders = torch.zeros(size, dtype=torch.int64)
        for each in range(mesh.world_size) if by.axes else ():
            holders[cut_dim(torch.arange(size), 0, by, mesh, mesh.coordinate(each))] += 1
        own = cut_dim(holders, 0, by, mesh, mesh.coordinate(rank))
        counts.append(own if by.axes else torch.full_like(own, mesh.world_size))
    return counts


def join_dim(pieces: Sequence[torch.Tensor], dim: int, by: DimSharding, size: int, mesh: Mesh) -> torch.Tensor:
    """Join the parts of one dim of `size` elements, one per rank of a mesh; only the first level may have blocks."""
    if not by.axes:
        return pieces[0]
    if by.parts:
        lengths = [
            [how.local_size(length, mesh, mesh.coordinate(rank)) for length, how in by.parts]
            for rank in range(len(pieces))
        ]
        split = [torch.split(piece, sizes, dim) for piece, sizes in zip(pieces, lengths, strict=True)]
        groups = zip(by.parts, zip(*split, strict=True), strict=True)
        return torch.cat([join_dim(own, dim, how, length, mesh) for (length, how), own in groups], dim)
    places = [tuple(mesh.coordinate(rank)[axis] for axis in by.axes) for rank in range(len(pieces))]
    in_order = [pieces[rank] for rank in sorted(range(len(pieces)), key=places.__getitem__)]
    if by.block:
        rows = [torch.unflatten(piece, dim, (size // by.block, -1)) for piece in in_order]
        return torch.cat(rows, dim + 1).flatten(dim, dim + 1)
    return torch.cat(in_order, dim)


def join(parts: Sequence[torch.Tensor], sharding: Sharding, mesh: Mesh, shape: Sequence[int]) -> list[torch.Tensor]:
    """Join the ranks' shares: return one whole tensor per coordinate on the replicated axes.

    Elements of parts that several ranks hold are the last rank's; a rank that differs there adds another whole.

    Raises:
        ValueError: the shapes of the shares do not match the sharding.
    """
    wholes = []
    for ranks in _replicas(sharding, mesh):
        wholes.append(_join({rank: parts[rank] for rank in ranks}, sharding, mesh, shape))
        for rank in _find_unlike(wholes[-1], parts.__getitem__, ranks, sharding, mesh):
            others = {other: parts[other] for other in ranks if other != rank}
            wholes.append(_join({**others, rank: parts[rank]}, sharding, mesh, shape))
    return wholes


def _find_unlike(
    whole: torch.Tensor, read: Callable[[int], torch.Tensor], ranks: Iterable[int], sharding: Sharding, mesh: Mesh
) -> list[int]:
    """Return the ranks whose elements are others than a whole's that was joined from them."""
    if not sharding.shares_parts or sharding.partial:
        return []
    return [rank for rank in ranks if not same_bits(read(rank), cut(whole, sharding, mesh, rank))]


def join_first(
    read: Callable[[int], torch.Tensor], sharding: Sharding, mesh: Mesh, shape: Sequence[int]
) -> torch.Tensor:
    """Join the first replica's shares to the whole tensor, reading no more ranks than necessary.

    Shares that `cut` made are restored bit by bit.

    Raises:
        ValueError: as `join`.
    """
    return _join({rank: read(rank) for rank in _replicas(sharding, mesh)[0]}, sharding, mesh, shape)


def refuse_unlike(read: Callable[[int], torch.Tensor], sharding: Sharding, mesh: Mesh, shape: Sequence[int]) -> None:
    """Check that ranks hold the same bits of what they share, and that pending values are held as `cut` deals them.

    Raises:
        ValueError: two ranks differ, or a rank that should hold no term holds one.
    """
    first: dict[tuple[int, ...], int] = {}
    for rank in range(mesh.world_size):
        here = mesh.coordinate(rank)
        for axis, op in sharding.partial:
            neutral = NEUTRAL.get(op)
            if here[axis] and neutral is not None and not bool((read(rank) == neutral).all()):
                raise ValueError(f"rank {rank} holds a term of its pending {op}, which is rank 0's of {axis!r} alone")
        term = [axis for axis, op in sharding.partial if op in NEUTRAL]
        other = first.setdefault(tuple(c for axis, c in here.items() if axis in (*sharding.cut_axes, *term)), rank)
        if other != rank and not same_bits(read(rank), read(other)):
            raise ValueError(f"it is not the same on ranks {other} and {rank}, which share it")
    if sharding.shares_parts and not sharding.partial:
        whole = join_first(read, sharding, mesh, shape)
        if unlike := _find_unlike(whole, read, range(mesh.world_size), sharding, mesh):
            raise ValueError(f"it is not the same on rank {unlike[0]} and others, which share parts of it")


def _replicas(sharding: Sharding, mesh: Mesh) -> list[list[int]]:
    """Return the ranks at each coordinate on the replicated axes."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(mesh.world_size):
        here = mesh.coordinate(rank)
        groups.setdefault(tuple(c for axis, c in here.items() if axis not in sharding.axes), []).append(rank)
    return list(groups.values())


def _join(parts: Mapping[int, torch.Tensor], sharding: Sharding, mesh: Mesh, shape: Sequence[int]) -> torch.Tensor:
    pending = dict(sharding.partial)
    wholes: dict[tuple[int, ...], torch.Tensor] = {}
    for rank, part in parts.items():
        here = mesh.coordinate(rank)
        if tuple(part.shape) != sharding.local_shape(shape, mesh, here):
            raise ValueError(f"rank {rank} holds {list(part.shape)} of {list(shape)} as {sharding.text(mesh)}")
        share = tuple(here[axis] for axis in pending)
        if share not in wholes:
            wholes[share] = part if not any(by.axes for by in sharding.dims) else part.new_empty(tuple(shape))
        if wholes[share] is not part:
            wholes[share][_index_of_share(sharding, shape, mesh, here)] = part
    return _reduce(wholes, list(pending.values()))


def _index_of_share(sharding: Sharding, shape: Sequence[int], mesh: Mesh, here: Mapping[str, int]) -> tuple[Any, ...]:
    """Return an index into the whole tensor that selects the elements at a coordinate."""
    places: list[Any] = []
    for dim, by in enumerate(sharding.dims):
        own = cut_dim(torch.arange(shape[dim]), 0, by, mesh, here)
        start = int(own[0]) if own.numel() else 0
        is_run = torch.equal(own, torch.arange(start, start + own.numel()))
        places.append(slice(start, start + own.numel()) if is_run else own)
    if sum(isinstance(each, torch.Tensor) for each in places) > 1:  # torch would pair them, element by element
        runs = [torch.arange(size)[place] for size, place in zip(shape, places, strict=True)]
        places = list(torch.meshgrid(runs, indexing="ij"))
    return tuple(places)


def _reduce(shares: Mapping[tuple[int, ...], torch.Tensor], ops: Sequence[str]) -> torch.Tensor:
    """Reduce the tensors at all coordinates on the pending axes, axis by axis."""
    for op in reversed(ops):
        groups: dict[tuple[int, ...], list[torch.Tensor]] = {}
        for at, value in shares.items():
            groups.setdefault(at[:-1], []).append(value)
        shares = {at: _reduce_over(op, values) for at, values in groups.items()}
    (whole,) = shares.values()
    return whole


def _reduce_over(op: str, values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Reduce the values; return the first unchanged if the others hold what `cut` deals them.

    A mean of equal values would be rounded, and -0 + 0 is 0.
    """
    first, *others = values
    neutral = NEUTRAL.get(op)
    if all(bool((each == neutral).all()) if neutral is not None else same_bits(each, first) for each in others):
        return first
    return REDUCE[op](torch.stack(list(values)))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True if two tensors have the same dtype, shape and bits, including NaNs and the signs of zeros."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    for dim in reversed(range(a.ndim)):
        if a.stride(dim) == b.stride(dim) == 0 and a.shape[dim]:  # an expanded dim repeats one number
            a, b = a.select(dim, 0), b.select(dim, 0)
    return torch.equal(_bytes(a), _bytes(b))


def _bytes(value: torch.Tensor) -> torch.Tensor:
    value = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value.resolve_neg()
    return value.reshape(-1).contiguous().view(torch.uint8)


def fitted(sharding: Sharding, shape: Sequence[Size], mesh: Mesh, what: str, asked_by: str = "") -> Sharding:
    """Return the sharding in its simplest form, for a tensor of this shape.

    Raises:
        ShardingError: parts that do not add up to the dim, blocks or units that do not divide it, or any of these on a
            dynamic dim.
    """
    dims = []
    for dim, (by, size) in enumerate(zip(sharding.dims, shape, strict=True)):
        if by.spans:
            raise ShardingError(
                f"cannot place {what} as {sharding.text(mesh)}: only operands of windows are held in spans",
                help=f"place it as S({dim})",
                asked_by=asked_by,
            )
        if not by.is_plain:
            if why := "it is dynamic" if not isinstance(size, int) else by.find_misfit(size, mesh):
                raise ShardingError(
                    f"cannot place {what} as {sharding.text(mesh)}: its dim {dim} is {size}, and {why}",
                    help=f"give parts that add up to {size}, units and blocks that divide it, or S({dim}) alone",
                    asked_by=asked_by,
                )
            by = _simplest(by, size, mesh)
        dims.append(by)
    return Sharding(tuple(dims), sharding.partial)


def _simplest(by: DimSharding, size: int, mesh: Mesh) -> DimSharding:
    """Return equal pieces as blocks, pieces without blocks of their size, and an even cut without units."""
    if by.parts:
        return DimSharding.of_parts([(length, _simplest(how, length, mesh)) for length, how in by.parts])
    levels = tuple(level._replace(unit=1) for level in by.levels)
    return (DimSharding(levels) if by.is_exact(size, mesh) else by).simplify(size, mesh)


def read_sharding(text: str, mesh: Mesh, ndim: int) -> Sharding:
    """Read a text that `Sharding.text` printed; raise a ValueError for any other text."""
    one = r"[RSP](?:\([^)]*\))?"
    axis = rf"{one}|\d+x{one}(?: \d+x{one})+"
    if not re.fullmatch(rf"{axis}|\[(?:{axis})(, (?:{axis}))*\]", text):
        raise ValueError(f"{text!r} is no sharding")
    items = dict(zip(dict(mesh.axes), re.findall(axis, text), strict=True))
    apart = replace(mesh, factors=tuple(own for own in mesh.factors if items[own[0]][0].isdigit()))
    each = [(degree, item) for text in items.values() for degree, item in re.findall(rf"(?:(\d+)x)?({one})", text)]
    if any(degree and int(degree) != apart.degree(part) for part, (degree, _) in zip(apart.names, each, strict=True)):
        raise ValueError(f"{text!r} has other factors than the mesh")
    placements = (parse_placement(item) for _, item in each)
    sharding = Sharding.of(dict(zip(apart.names, placements, strict=True)), apart, ndim, "a tensor")
    for axis, _ in mesh.factors:
        sharding = sharding.split_axis(axis, mesh.parts_of(axis)) if axis in apart.names else sharding
    return sharding


def mesh_of(manifest: Manifest) -> Mesh:
    return Mesh.of(manifest.mesh, manifest.factors)


def row_sharding(row: PlacedRecord, mesh: Mesh) -> Sharding:
    """Return the sharding of a tensor in a manifest.

    Raises:
        ArtifactError: a tensor of its shape cannot have this sharding on this mesh.
    """
    try:
        sharding = read_sharding(row.sharding, mesh, len(row.shape))
        cuts = [by if isinstance(size, int) else WHOLE for by, size in zip(sharding.dims, row.shape, strict=True)]
        fitted(Sharding(tuple(cuts)), row.shape, mesh, row.name)
    except (TpCompilerError, ValueError) as error:
        text = f"{row.name!r} of {row.shape} is {row.sharding}"
        raise ArtifactError(
            f"the manifest says that {text}, which it cannot be on {mesh}", help="convert the model again"
        ) from error
    return sharding
