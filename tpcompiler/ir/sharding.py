"""The layout of one tensor over the mesh, dim by dim.

torch writes a tuple of placements, one per mesh axis. That cannot express "whole heads of 4 elements", or "the heads of
every batch row in a dim of batch * heads". The nouns here are per tensor dim: the axes that shard it, in which unit and
in which blocks. torch's form is read at the boundary and printed wherever it is the whole truth.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from tpcompiler.errors import ShardingError, UnsupportedError
from tpcompiler.ir.dim_sharding import WHOLE, DimSharding, Level, Size
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.placements import Cut, Piece, PlacementSpec, format_placement


def commute(ops: Iterable[str]) -> bool:
    """Return True if reductions over several axes commute: all of one kind, or sums and averages."""
    return len({"sum" if op == "avg" else op for op in ops}) <= 1


def refuse_mixed(partial: Iterable[tuple[str, str]], what: str, asked_by: str) -> None:
    """Raise a ShardingError if pending reductions do not commute: a max of sums is no sum of maxima."""
    if not commute(op for _, op in partial):
        text = " and ".join(f"P({op}) over '{axis}'" for axis, op in partial)
        raise ShardingError(
            f"{what} cannot be {text}: what that is depends on the order of the reductions",
            help="reduce over one of the axes first: place it as R there",
            asked_by=asked_by,
        )


@dataclass(frozen=True)
class Sharding:
    """The layout of one tensor: a `DimSharding` per dim, and at most one pending reduction per axis, all commuting."""

    dims: tuple[DimSharding, ...]
    partial: tuple[tuple[str, str], ...] = ()  # (axis, reduce op), sorted by axis

    def __hash__(self) -> int:  # the search looks up the same few shardings all the time
        cache = self.__dict__
        if "hash" not in cache:
            cache["hash"] = hash((self.dims, self.partial))
        return cache["hash"]  # type: ignore[no-any-return]

    def __reduce__(self) -> Any:
        return Sharding, (self.dims, self.partial)

    @classmethod
    def replicated(cls, ndim: int) -> Sharding:
        return cls((WHOLE,) * ndim)

    @classmethod
    def of(cls, spec: PlacementSpec, mesh: Mesh, ndim: int, what: str, asked_by: str = "") -> Sharding:
        """Read placements for a tensor with `ndim` dims; `what` and `asked_by` name it in errors.

        Raises:
            ShardingError: an unknown axis, a dim that the tensor does not have, or reductions that do not commute.
        """
        by_axis: Mapping[str, Placement]
        if isinstance(spec, Mapping):
            by_axis = spec
        elif len(mesh.names) == 1 or type(spec) is Replicate:  # R holds for every axis
            by_axis = dict.fromkeys(mesh.names, spec)
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
            if isinstance(placement, Cut) or type(placement) is Shard:
                if not -ndim <= placement.dim < ndim:
                    raise ShardingError(
                        f"cannot shard {what} on dim {placement.dim}: it has {ndim} dims",
                        help=f"use a dim from {-ndim} to {ndim - 1}" if ndim else "pin it to R",
                        asked_by=asked_by,
                    )
                dim = placement.dim % ndim
                pieces = placement.pieces if isinstance(placement, Cut) else (Piece(),)
                cut = _with_axis(dims[dim], axis, pieces)
                if cut is None:
                    raise ShardingError(
                        f"cannot place {what} as {format_placement(placement)} on '{axis}': the axes before it cut "
                        f"dim {dim} otherwise",
                        help="give the same parts for all axes of a dim, with an r behind what an axis leaves whole",
                        asked_by=asked_by,
                    )
                dims[dim] = cut if mesh.degree(axis) > 1 else dims[dim]  # an axis of degree 1 shards nothing
            elif type(placement) is Partial:
                partial += [(axis, placement.reduce_op)] * (mesh.degree(axis) > 1)
            elif type(placement) is not Replicate:
                raise UnsupportedError(
                    f"placement {placement} of {what} is not supported", help="use R, S(dim) or P(op)"
                )
        refuse_mixed(partial, what, asked_by)
        return cls(tuple(dims), tuple(sorted(partial)))

    @property
    def ndim(self) -> int:
        return len(self.dims)

    @cached_property
    def axes(self) -> frozenset[str]:
        """The axes on which the tensor is not replicated."""
        return frozenset(a for dim in self.dims for a in dim.axes) | {axis for axis, _ in self.partial}

    @property
    def shares_parts(self) -> bool:
        """True if ranks share one part of a dim and cut another, as keys and values next to queries."""
        return any({*how.axes} != {*dim.axes} for dim in self.dims for _, how in dim.parts)

    @cached_property
    def cut_axes(self) -> tuple[str, ...]:
        """The axes that shard a dim."""
        return tuple(axis for dim in self.dims for axis in dim.axes)

    @cached_property
    def has_spans(self) -> bool:
        """True if ranks hold overlapping parts of a dim."""
        return any(cut.spans for cut in self.dims)

    @property
    def without_spans(self) -> Sharding:
        """The sharding into shares that do not overlap, by the same axes."""
        return Sharding(tuple(cut.without_spans for cut in self.dims), self.partial) if self.has_spans else self

    def dims_cut_by(self, axis: str) -> list[int]:
        """Return the dims that `axis` shards."""
        return [dim for dim, cut in enumerate(self.dims) if axis in cut.axes]

    @property
    def is_replicated(self) -> bool:
        return not self.axes

    def with_dim(self, dim: int, cut: DimSharding) -> Sharding:
        """Return this sharding with another cut of one dim."""
        return Sharding((*self.dims[:dim], cut, *self.dims[dim + 1 :]), self.partial)

    def permute(self, order: Sequence[int]) -> Sharding:
        """Return the sharding of `tensor.permute(order)`."""
        return Sharding(tuple(self.dims[dim] for dim in order), self.partial)

    def split_axis(self, axis: str, parts: Sequence[str]) -> Sharding:
        """Return the same layout on a mesh that has the axes `parts` instead of `axis`."""
        partial = [(a, op) for old, op in self.partial for a in (parts if old == axis else (old,))]
        return Sharding(tuple(dim.split_axis(axis, parts) for dim in self.dims), tuple(sorted(partial)))

    def join_factors(self, mesh: Mesh) -> tuple[Sharding, Mesh]:
        """Return the sharding and the mesh without the factors of axes of which it shards all alike, or none."""
        found = self
        for axis, _ in mesh.factors:
            parts = mesh.parts_of(axis)
            partial = {(axis if old == parts[0] else old, op) for old, op in found.partial if old not in parts[1:]}
            one = Sharding(tuple(dim.join_axis(axis, parts) for dim in found.dims), tuple(sorted(partial)))
            if one.split_axis(axis, parts) == found:
                found, mesh = one, mesh.join(axis)
        return found, mesh

    def axis_part(self, axis: str) -> Sharding:
        """Return the part of this sharding over `axis`."""
        return Sharding(tuple(dim.axis_part(axis) for dim in self.dims), tuple(p for p in self.partial if p[0] == axis))

    def restrict_to(self, axes: Collection[str], shape: Sequence[Size], mesh: Mesh) -> Sharding:
        """Return the part of this sharding over `axes`, for a tensor of `shape`."""
        if self.axes.issubset(axes):
            return self
        dims = (
            cut if set(cut.axes) <= set(axes) else cut.restrict_to(axes, size, mesh)
            for cut, size in zip(self.dims, shape, strict=True)
        )
        return Sharding(tuple(dims), tuple(p for p in self.partial if p[0] in axes))

    def nest_in(self, other: Sharding, axes: Collection[str]) -> Sharding:
        """Return this sharding over `axes`, nested inside the other's sharding over the remaining axes."""
        dims = []
        for own, others in zip(self.dims, other.dims, strict=True):
            outer = others
            for axis in [a for a in others.axes if a in axes]:
                outer = outer.drop_axis(axis)
            dims.append(outer.nest(own) if own.axes else outer)
        partial = [(a, op) for a, op in other.partial if a not in axes] + list(self.partial)
        return Sharding(tuple(dims), tuple(sorted(partial)))

    @property
    def without_partial(self) -> Sharding:
        """The sharding after every pending reduction is done."""
        return Sharding(self.dims)

    def local_shape(self, shape: Sequence[Size], mesh: Mesh, coordinate: Mapping[str, int]) -> tuple[Size, ...]:
        return tuple(dim.local_size(size, mesh, coordinate) for dim, size in zip(self.dims, shape, strict=True))

    @lru_cache(maxsize=1 << 15)  # noqa: B019  # the search asks for the same few all the time
    def local_bytes(self, shape: tuple[int, ...], itemsize: int, mesh: Mesh, rank: int | None = None) -> int:
        """Return the bytes that a rank holds of a tensor; without a rank, those of the rank that holds most."""
        if self.is_replicated:
            return math.prod(shape) * itemsize
        if rank is None and self.is_even(shape, mesh):
            rank = 0
        ranks = range(mesh.world_size) if rank is None else [rank]
        return max(math.prod(self.local_shape(shape, mesh, mesh.coordinate(each))) for each in ranks) * itemsize

    def is_even(self, shape: Sequence[Size], mesh: Mesh) -> bool:
        """Return True if every rank holds a shard of the same shape."""
        return all(dim.is_even(size, mesh) for dim, size in zip(self.dims, shape, strict=True))

    def placements(self, mesh: Mesh) -> tuple[Placement, ...]:
        """Return torch's form, one placement per mesh axis (which cannot express units, blocks and parts)."""
        out: list[Placement] = []
        partial = dict(self.partial)
        for axis in mesh.names:
            dim = next((d for d, cut in enumerate(self.dims) if axis in cut.axes), None)
            out.append(Shard(dim) if dim is not None else Partial(partial[axis]) if axis in partial else Replicate())
        return tuple(out)

    def text(self, mesh: Mesh) -> str:
        """Return `S(1)` on one axis, `[S(0), R]` on several, and more than torch can express: `S(2, unit 4, block 24)`.

        `S(0, parts 16 8 8r)`: three pieces in a row; the axis leaves the last one whole. `S(0, outside dp)`: the axis
        `dp` is nested in this one although the mesh names it first; for one piece: `16<dp`. `S(2, spans 0:5 3:8)`: the
        first rank holds 0 to 4, the second 3 to 7.

        `2xS(1) 2xR`: two halves of an axis of 4 ranks, each on two neighbours. `S(1)` shards a dim over one factor of
        the axis and then over the next, so the shares of an uneven dim are not those of `torch.chunk`.
        """
        if mesh.factors:
            joined, mesh = self.join_factors(mesh)
            if joined is not self:
                return joined.text(mesh)
        words = dict[str, str]()
        for axis, placement in zip(mesh.names, self.placements(mesh), strict=True):
            if type(placement) is Shard:
                placement = Cut(placement.dim, _pieces(self.dims[placement.dim], axis, mesh))
            words[axis] = format_placement(placement)
        texts = []
        for axis, _ in mesh.axes:
            own = mesh.parts_of(axis)
            each = [f"{mesh.degree(part)}x{words[part]}" for part in own]
            texts.append(words[axis] if len(own) == 1 else " ".join(each))
        return texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]"


def _pieces(dim: DimSharding, axis: str, mesh: Mesh) -> tuple[Piece, ...]:
    """Describe how `axis` shards a dim; `outside` is the first axis nested in it that the mesh names earlier."""
    pieces = []
    for size, cut in dim.parts or ((0, dim),):
        inner = cut.axes[cut.axes.index(axis) + 1 :] if axis in cut.axes else ()
        earlier = [a for a in inner if mesh.names.index(a) < mesh.names.index(axis)]
        _, block, unit = cut.level(axis) if axis in cut.axes else Level(axis)
        pieces.append(Piece(size, axis in cut.axes, unit, block, earlier[0] if earlier else "", cut.spans))
    return tuple(pieces)


def _with_axis(dim: DimSharding, axis: str, pieces: Sequence[Piece]) -> DimSharding | None:
    """Return the cut after one more axis shards the dim in `pieces`; None if the other axes use other pieces."""
    if not dim.parts and not pieces[0].size:
        return _with_level(dim, axis, pieces[0])
    parts = dim.parts or tuple((piece.size, WHOLE) for piece in pieces if not dim.levels)
    cuts = [_with_level(how, axis, piece) for (_, how), piece in zip(parts, pieces, strict=False)]
    if [size for size, _ in parts] != [piece.size for piece in pieces]:
        return None
    sized = [(piece.size, cut) for piece, cut in zip(pieces, cuts, strict=True) if cut is not None]
    return DimSharding(parts=tuple(sized)) if len(sized) == len(pieces) else None


def _with_level(cut: DimSharding, axis: str, piece: Piece) -> DimSharding | None:
    if not piece.cut:
        return cut
    if piece.outside and piece.outside not in cut.axes:
        return None
    at = cut.axes.index(piece.outside) if piece.outside else len(cut.levels)
    levels = *cut.levels[:at], Level(axis, piece.block, piece.unit), *cut.levels[at:]
    return DimSharding(levels, spans=piece.spans)
