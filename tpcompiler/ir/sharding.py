"""How one tensor is laid out over the mesh, dim by dim.

torch writes a tuple of placements, one per mesh axis. That cannot say "whole heads of 4 elements", or "the heads of
every batch row in a dim of batch * heads", so the nouns here are per tensor dim: which axes cut it, in which unit, and
in which blocks. Torch's form is read at the boundary and printed where it is the whole truth.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from tpcompiler.errors import ShardingError, UnsupportedError
from tpcompiler.ir.dim_sharding import WHOLE, DimSharding, Level, Size
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.placements import Cut, Piece, PlacementSpec, format_placement


def commute(ops: Iterable[str]) -> bool:
    """Whether reductions over several axes give the same in any order: all of one kind, or sums and averages."""
    return len({"sum" if op == "avg" else op for op in ops}) <= 1


def refuse_mixed(partial: Iterable[tuple[str, str]], what: str, asked_by: str) -> None:
    """Raise a ShardingError where pending reductions do not commute: a max of sums is no sum of maxima."""
    if not commute(op for _, op in partial):
        said = " and ".join(f"P({op}) over '{axis}'" for axis, op in partial)
        raise ShardingError(
            f"{what} cannot be {said}: what that is depends on the order of the reductions",
            help="reduce over one of the axes first: place it as R there",
            asked_by=asked_by,
        )


@dataclass(frozen=True)
class Sharding:
    """The layout of one tensor: a `DimSharding` per tensor dim, and pending reductions, which commute, one per axis."""

    dims: tuple[DimSharding, ...]
    partial: tuple[tuple[str, str], ...] = ()  # (axis, reduce op), sorted by axis

    def __hash__(self) -> int:  # the search looks up the same few shardings all the time
        known = self.__dict__
        if "hash" not in known:
            known["hash"] = hash((self.dims, self.partial))
        return known["hash"]  # type: ignore[no-any-return]

    def __reduce__(self) -> Any:
        return Sharding, (self.dims, self.partial)

    @classmethod
    def replicated(cls, ndim: int) -> Sharding:
        return cls((WHOLE,) * ndim)

    @classmethod
    def of(cls, spec: PlacementSpec, mesh: Mesh, ndim: int, what: str, asked_by: str = "") -> Sharding:
        """Read placements for a tensor of order `ndim`; `what` and `asked_by` name it in errors.

        Raises:
            ShardingError: an unknown axis, a dim that the tensor does not have, or reductions that do not commute.
        """
        by_axis: Mapping[str, Placement]
        if isinstance(spec, Mapping):
            by_axis = spec
        elif len(mesh.axes) == 1 or type(spec) is Replicate:  # whole is whole on every axis
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
                dims[dim] = cut if mesh.degree(axis) > 1 else dims[dim]  # one rank has all of it
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
        """Every axis on which the tensor is not replicated."""
        return frozenset(a for dim in self.dims for a in dim.axes) | {axis for axis, _ in self.partial}

    @cached_property
    def cut_axes(self) -> tuple[str, ...]:
        """Every axis that cuts a dim."""
        return tuple(axis for dim in self.dims for axis in dim.axes)

    @property
    def is_replicated(self) -> bool:
        return not self.axes

    def permuted(self, order: Sequence[int]) -> Sharding:
        """The sharding of `tensor.permute(order)`."""
        return Sharding(tuple(self.dims[dim] for dim in order), self.partial)

    def over(self, axis: str, both: tuple[str, str]) -> Sharding:
        """The same layout on a mesh of which the axis is two."""
        partial = [(a, op) for old, op in self.partial for a in (both if old == axis else (old,))]
        return Sharding(tuple(dim.over(axis, both) for dim in self.dims), tuple(sorted(partial)))

    def only(self, axis: str) -> Sharding:
        """What of it is over this axis."""
        return Sharding(tuple(dim.only(axis) for dim in self.dims), tuple(p for p in self.partial if p[0] == axis))

    def without(self, axes: Collection[str]) -> Sharding:
        """What of it is over the other axes."""
        dims = list(self.dims)
        for axis in axes:
            dims = [dim.without(axis) if axis in dim.axes else dim for dim in dims]
        return Sharding(tuple(dims), tuple(p for p in self.partial if p[0] not in axes))

    def within(self, axes: Collection[str], shape: Sequence[Size], mesh: Mesh) -> Sharding:
        """What of a tensor of `shape` is over these axes."""
        dims = (
            cut if set(cut.axes) <= set(axes) else cut.within(axes, size, mesh)
            for cut, size in zip(self.dims, shape, strict=True)
        )
        return Sharding(tuple(dims), tuple(p for p in self.partial if p[0] in axes))

    def beside(self, other: Sharding, axes: Collection[str]) -> Sharding:
        """This sharding over `axes`, inside of what the other is over all others."""
        dims = []
        for own, its in zip(self.dims, other.dims, strict=True):
            kept = its
            for axis in [a for a in its.axes if a in axes]:
                kept = kept.without(axis)
            dims.append(kept.inside(own) if own.axes else kept)
        partial = [(a, op) for a, op in other.partial if a not in axes] + list(self.partial)
        return Sharding(tuple(dims), tuple(sorted(partial)))

    def settled(self) -> Sharding:
        """The same cut with every pending reduction done."""
        return Sharding(self.dims)

    def local_shape(self, shape: Sequence[Size], mesh: Mesh, coordinate: Mapping[str, int]) -> tuple[Size, ...]:
        return tuple(dim.local_size(size, mesh, coordinate) for dim, size in zip(self.dims, shape, strict=True))

    def is_even(self, shape: Sequence[Size], mesh: Mesh) -> bool:
        """Whether every rank holds a shard of the same shape."""
        return all(dim.is_even(size, mesh) for dim, size in zip(self.dims, shape, strict=True))

    def placements(self, mesh: Mesh) -> tuple[Placement, ...]:
        """torch's form, one placement per mesh axis (units, blocks and parts are not expressible there)."""
        out: list[Placement] = []
        partial = dict(self.partial)
        for axis in mesh.names:
            dim = next((d for d, cut in enumerate(self.dims) if axis in cut.axes), None)
            out.append(Shard(dim) if dim is not None else Partial(partial[axis]) if axis in partial else Replicate())
        return tuple(out)

    def text(self, mesh: Mesh) -> str:
        """`S(1)` on one axis, `[S(0), R]` on several; beside what torch cannot say: `S(2, unit 4, block 24)`.

        `S(0, parts 16 8 8r)`: three pieces in a row, of which the axis leaves the last whole. `S(0, outside dp)`: the
        axis `dp`, which the mesh names first, cuts what this one has left; of one piece: `16<dp`.
        """
        parts = []
        for axis, placement in zip(mesh.names, self.placements(mesh), strict=True):
            if type(placement) is Shard:
                placement = Cut(placement.dim, _pieces(self.dims[placement.dim], axis, mesh))
            parts.append(format_placement(placement))
        return parts[0] if len(parts) == 1 else f"[{', '.join(parts)}]"


def _pieces(dim: DimSharding, axis: str, mesh: Mesh) -> tuple[Piece, ...]:
    """How one of its axes cuts a dim; `outside` is the first axis inside of it that the mesh names before it."""
    found = []
    for size, cut in dim.parts or ((0, dim),):
        inner = cut.axes[cut.axes.index(axis) + 1 :] if axis in cut.axes else ()
        earlier = [a for a in inner if mesh.names.index(a) < mesh.names.index(axis)]
        _, block, unit = cut.level(axis) if axis in cut.axes else Level(axis)
        found.append(Piece(size, axis in cut.axes, unit, block, earlier[0] if earlier else ""))
    return tuple(found)


def _with_axis(dim: DimSharding, axis: str, pieces: Sequence[Piece]) -> DimSharding | None:
    """The cut of a dim that one more axis cuts so; None where the other axes cut it in other pieces."""
    if not dim.parts and not pieces[0].size:
        return _with_level(dim, axis, pieces[0])
    parts = dim.parts or tuple((piece.size, WHOLE) for piece in pieces if not dim.levels)
    made = [_with_level(how, axis, piece) for (_, how), piece in zip(parts, pieces, strict=False)]
    if [size for size, _ in parts] != [piece.size for piece in pieces]:
        return None
    found = [(piece.size, cut) for piece, cut in zip(pieces, made, strict=True) if cut is not None]
    return DimSharding(parts=tuple(found)) if len(found) == len(pieces) else None


def _with_level(cut: DimSharding, axis: str, piece: Piece) -> DimSharding | None:
    if not piece.cut:
        return cut
    if piece.outside and piece.outside not in cut.axes:
        return None
    at = cut.axes.index(piece.outside) if piece.outside else len(cut.levels)
    return DimSharding((*cut.levels[:at], Level(axis, piece.block, piece.unit), *cut.levels[at:]))
