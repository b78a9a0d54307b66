"""The device mesh: named axes with degrees, ranks in row-major order."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from types import MappingProxyType

from tpcompiler.errors import MeshError, UnsupportedError, option

PIPELINE = "pp"  # the axis whose ranks run the stages of a program
MAX_AXES = 64  # torch's own limit on the dims of a tensor
FACTOR = re.compile(r"\[:([1-9]\d*)?(?::([1-9]\d*))?\]$")  # of a part of an axis, at the end of its name
MAX_RANKS = 1 << 16  # more than any machine has; a hidden size passed as a degree by mistake would run for hours


@dataclass(frozen=True)
class Mesh:
    """Named axes and their degrees, e.g. `Mesh((("dp", 2), ("tp", 4)))`; rank = row-major index.

    `group_of_world` names an existing process group that a mesh of one axis uses instead of a logical name.
    `factors`: axes that run as several, nested, such as `(("tp", (2, 2)),)` for pairs of ranks that share heads.
    Shardings name these, as slices that select the first group's ranks: `tp[::2]`, then `tp[:2]`. Users see `tp=4`.
    `shares`: axes whose ranks hold unequal shares, such as `(("tp", (2, 1, 1)),)`, the largest first, in lowest terms.

    Raises:
        MeshError: no axes, a repeated or unreadable name, a degree below 1, shares that are not one for each rank in
            descending order, more axes than `MAX_AXES`, or more ranks than `MAX_RANKS`.
    """

    axes: tuple[tuple[str, int], ...]
    group_of_world: str | None = None
    factors: tuple[tuple[str, tuple[int, ...]], ...] = ()
    shares: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def __post_init__(self) -> None:
        names = [name for name, _ in self.axes]
        if not names or len(set(names)) != len(names):
            raise MeshError(
                f"a mesh needs one or more differently named axes, got {names}",
                help=option("write --tp 4, or --mesh dp=2,tp=4", 'write it as {"tp": 4} or as the integer 4'),
            )
        if len(names) > MAX_AXES:
            raise MeshError(f"a mesh has {len(names)} axes", help=f"use at most {MAX_AXES}")
        for name, degree in self.axes:
            if not (isinstance(name, str) and FACTOR.sub("", name).isidentifier()):
                raise MeshError(f"mesh axis {name!r} is not a name", help='use a name such as "tp"')
            if isinstance(degree, bool) or not isinstance(degree, int) or degree < 1:
                raise MeshError(
                    f"mesh axis {name!r} has degree {degree!r}", help="a degree is an integer of at least 1"
                )
        if self.world_size > MAX_RANKS:
            raise MeshError(
                f"mesh {self} has {self.world_size} ranks",
                help=f"one program is made per rank: use at most {MAX_RANKS} ranks",
            )

        for name, shares in self.shares:
            if len(shares) != dict(self.axes)[name] or list(shares) != sorted(shares, reverse=True):
                raise MeshError(
                    f"mesh axis {name!r} has the shares {':'.join(map(str, shares))}",
                    help="give one for each rank, the largest first, such as 2:1:1: rank 0 is the largest device",
                )

    @classmethod
    def of(
        cls,
        mesh: MeshLike,
        factors: Mapping[str, Sequence[int]] = MappingProxyType({}),
    ) -> Mesh:
        """Return the mesh that a user wrote as a `Mesh`, a mapping, or an int (one axis named `tp`).

        A sequence instead of a degree gives the shares of an axis' ranks: `{"tp": [2, 1, 1]}`.
        """
        if not isinstance(mesh, Mesh):
            given = mesh if isinstance(mesh, Mapping) else {"tp": mesh}
            shares = {name: _read_shares(name, each) for name, each in given.items() if isinstance(each, (list, tuple))}
            mesh = cls(
                tuple((name, len(shares[name]) if name in shares else each) for name, each in given.items()),  # type: ignore[misc]
                factors=tuple((axis, tuple(degrees)) for axis, degrees in factors.items()),
                shares=tuple((name, own) for name, own in shares.items() if len({*own}) > 1),
            )
        if parts := [axis for axis, _ in mesh.axes if FACTOR.search(axis)]:
            raise MeshError(f"mesh axis {parts[0]!r} is not a name", help='use a name such as "tp"')
        return mesh

    @cached_property
    def parts(self) -> tuple[tuple[str, int], ...]:
        """The axes that shardings name, with their degrees: an axis that runs as several as its factors."""
        own = dict(self.factors)
        return tuple(part for axis, degree in self.axes for part in _named(axis, own.get(axis, (degree,))))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The axes that shardings name."""
        return tuple(name for name, _ in self.parts)

    @property
    def world_size(self) -> int:
        return math.prod(degree for _, degree in self.axes)

    @property
    def model_axis(self) -> str:
        """The axis over which a plan's styles shard layers: `tp`, or the last axis if there is no `tp`."""
        return self.parts_of("tp" if "tp" in dict(self.axes) else self.axes[-1][0])[-1]

    def degree(self, axis: str) -> int:
        return self._degrees[axis]

    def deals(self, axis: str) -> int | tuple[int, ...]:
        """Return how an axis deals units out (see `dim_sharding.chunk`): to as many ranks alike, or in these shares."""
        return self._shares.get(axis) or self.degree(axis)

    def pieces(self, axis: str) -> int:
        """Return the least number of equal pieces of which every rank along an axis can hold whole ones."""
        return sum(self._shares.get(axis, ())) or self.degree(axis)

    def is_unequal(self, axes: Iterable[str]) -> bool:
        """Return True if ranks along one of these axes hold unequal shares."""
        return not self._shares.keys().isdisjoint(axes)

    @cached_property
    def _shares(self) -> dict[str, tuple[int, ...]]:
        return dict(self.shares)

    def along(self, axes: Iterable[str]) -> Mesh:
        """Return the mesh of these axes alone, as their own groups see it."""
        own = tuple(axes)
        shares = tuple(each for each in self.shares if each[0] in own)
        return Mesh(tuple((axis, self.degree(axis)) for axis in own), shares=shares)

    @property
    def written(self) -> dict[str, int | list[int]]:
        """The mesh as `of` takes it and manifests have it, without its factors."""
        return {name: list(self._shares.get(name, ())) or degree for name, degree in self.axes}

    @cached_property
    def _degrees(self) -> dict[str, int]:
        return dict(self.axes) | dict(self.parts)

    def parts_of(self, axis: str) -> tuple[str, ...]:
        """Return the names of an axis' factors, outermost first; the axis itself if it has none."""
        return tuple(name for name, _ in _named(axis, dict(self.factors).get(axis, (1,))))

    def coordinate(self, rank: int) -> dict[str, int]:
        """Return the position of `rank` on each axis.

        Raises:
            MeshError: `rank` is outside the mesh.
        """
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < self.world_size:
            raise MeshError(
                f"rank {rank!r} is outside the mesh {self} of {self.world_size} ranks",
                help=f"use a rank from 0 to {self.world_size - 1}",
            )
        position = {}
        for name, degree in reversed(self.parts):
            rank, position[name] = divmod(rank, degree)
        return {name: position[name] for name in self.names}

    def split(self, axis: str, outer: int) -> Mesh:
        """Return the mesh on which `axis` runs as two, the outer one with `outer` ranks."""
        return replace(self, factors=(*self.factors, (axis, (outer, self.degree(axis) // outer))))

    def join(self, axis: str) -> Mesh:
        """Return the mesh on which `axis` is one again."""
        return replace(self, factors=tuple(own for own in self.factors if own[0] != axis))

    def ordered(self, axes: Collection[str]) -> tuple[str, ...]:
        """Return `axes` in the mesh's order."""
        return tuple(name for name in self.names if name in axes)

    def index(self, axes: Sequence[str], rank: int) -> int:
        """Return the position of `rank` in its group over these axes; the last axis runs fastest."""
        here, place = self.coordinate(rank), 0
        for axis in axes:
            place = place * self.degree(axis) + here[axis]
        return place

    def size(self, axes: Sequence[str]) -> int:
        """Return the number of ranks in a group over these axes."""
        return math.prod(self.degree(axis) for axis in axes)

    @lru_cache(maxsize=1 << 10)  # noqa: B019  # a mesh is small, and there are few
    def crosses(self, axes: tuple[str, ...], ranks_per_node: int) -> bool:
        """Return True if a group over these axes spans several nodes of `ranks_per_node` ranks each."""
        groups = (self.group(axes, rank) for rank in range(self.world_size))
        return any(len({rank // ranks_per_node for rank in group}) > 1 for group in groups)

    def group(self, axes: Collection[str], rank: int) -> tuple[int, ...]:
        """Return the ranks that share every coordinate of `rank` except those on `axes`, in order."""
        here = self.coordinate(rank)
        return tuple(map(self._rank, self._places({name: at for name, at in here.items() if name not in axes})))

    def groups(self, axes: Collection[str]) -> tuple[tuple[int, ...], ...]:
        firsts = self._places(dict.fromkeys(self.ordered(axes), 0))
        return tuple(self.group(axes, self._rank(first)) for first in firsts)

    def _places(self, fixed: Mapping[str, int]) -> Iterator[tuple[int, ...]]:
        """Yield the positions with these coordinates, in rank order."""
        return itertools.product(*([fixed[name]] if name in fixed else range(degree) for name, degree in self.parts))

    def _rank(self, place: Iterable[int]) -> int:
        rank = 0
        for (_, degree), at in zip(self.parts, place, strict=True):
            rank = rank * degree + at
        return rank

    def group_name(self, axes: Sequence[str]) -> str:
        """Return the group's logical process-group name in the graphs, unique among meshes that live in one process.

        Raises:
            UnsupportedError: the group is a part of the running process group, and nobody made a group of that part.
        """
        if self.group_of_world is None:
            return f"{replace(self, shares=())}:{self.text(axes)}"
        if self.size(axes) < self.world_size:
            raise UnsupportedError(
                f"a collective over {self.text(axes)} of mesh {self} needs groups inside of the running process group",
                help="use tpcompiler.parallelize and tpcompiler.load, which makes them",
            )
        return self.group_of_world

    def axes_of(self, group_name: str) -> tuple[str, ...]:
        """Return the axes of a group, given a name that `group_name` returned."""
        if group_name == self.group_of_world:
            return self.names
        return self.read(group_name.partition(":")[2])

    def text(self, axes: Sequence[str]) -> str:
        """Return the text of a group's axes, such as `dp.tp`; all factors of an axis are that axis."""
        left, words = list(axes), []
        for axis, _ in self.axes:
            own = [name for name in self.parts_of(axis) if name in left]
            words += [axis] if len(own) == len(self.parts_of(axis)) else own
            left = [name for name in left if name not in own]
        return ".".join([*words, *left])

    def read(self, text: str) -> tuple[str, ...]:
        """Return the axes that `text` printed."""
        return tuple(name for axis in text.split(".") for name in self.parts_of(axis))

    def __str__(self) -> str:
        return ",".join(f"{name}={':'.join(map(str, self._shares.get(name, (degree,))))}" for name, degree in self.axes)


MeshLike = int | Mapping[str, int | Sequence[int]] | Mesh  # what a user may write for a mesh


def _read_shares(name: str, shares: Sequence[int]) -> tuple[int, ...]:
    """Return shares in lowest terms."""
    if not shares or any(isinstance(each, bool) or not isinstance(each, int) or each < 1 for each in shares):
        raise MeshError(
            f"mesh axis {name!r} has the shares {list(shares)}", help="a share is an integer of at least 1, as in 2:1:1"
        )
    common = math.gcd(*shares)
    return tuple(each // common for each in shares)


def _named(axis: str, degrees: Sequence[int]) -> Iterator[tuple[str, int]]:
    """Yield the names and degrees of an axis' factors: slices that select the ranks of the first group over each."""
    whole = stop = math.prod(degrees)
    for degree in degrees:
        step = stop // degree
        inside = f"[:{stop if stop < whole else ''}{f':{step}' if step > 1 else ''}]"
        yield axis if len(degrees) == 1 else f"{axis}{inside}", degree
        stop = step


def hosted_group(name: str, processes: int) -> str:
    """Return the name of a group's processes, each of which runs several ranks (`ir/hosting.py`)."""
    return f"{name}@{processes}"


def hosted_groups(groups: Iterable[Sequence[int]], each: int) -> tuple[tuple[int, ...], ...]:
    """Return the processes that run the ranks of each group, `each` ranks in a row on a process."""
    return tuple(dict.fromkeys(tuple(dict.fromkeys(rank // each for rank in ranks)) for ranks in groups))


@lru_cache
def groups_named(name: str) -> tuple[tuple[int, ...], ...]:
    """Return the groups of ranks with a name that `Mesh.group_name` returned; () for any other name.

    Of a name that `hosted_group` returned, the groups of processes.
    """
    name, _, processes = name.partition("@")
    if processes:
        groups = groups_named(name)
        return hosted_groups(groups, sum(map(len, groups)) // int(processes))
    text, _, axes = name.partition(":")
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(axis.isidentifier() and degree.isdecimal() for axis, _, degree in pairs):
        return ()
    degrees = {axis: int(degree) for axis, _, degree in pairs}
    bounds: dict[str, set[int]] = {}
    for part in axes.split("."):
        if found := FACTOR.search(part):
            axis = part[: found.start()]
            bounds.setdefault(axis, {1, degrees.get(axis, 1)}).update(int(bound) for bound in found.groups() if bound)
    factors = {axis: [big // small for big, small in pairwise(sorted(own)[::-1])] for axis, own in bounds.items()}
    mesh = Mesh.of(degrees, factors)
    return mesh.groups(mesh.read(axes)) if {*mesh.read(axes)} <= {*mesh.names} else ()
