"""The device mesh: named axes with degrees, ranks in row-major order."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from tpcompiler.errors import MeshError, UnsupportedError, option

MAX_AXES = 64  # torch's own limit on the dims of a tensor
MAX_RANKS = 1 << 16  # more than any machine has; a hidden size passed as a degree by mistake would run for hours


@dataclass(frozen=True)
class Mesh:
    """Named axes and their degrees, e.g. `Mesh((("dp", 2), ("tp", 4)))`; rank = row-major index.

    `group_of_world` names an existing process group that a mesh of one axis uses instead of a logical name.

    Raises:
        MeshError: no axes, a repeated or unreadable name, a degree below 1, more axes than `MAX_AXES`, or more ranks
            than `MAX_RANKS`.
    """

    axes: tuple[tuple[str, int], ...]
    group_of_world: str | None = None

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
            if not (isinstance(name, str) and name.isidentifier()):
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

    @classmethod
    def of(cls, mesh: Mesh | int | Mapping[str, int]) -> Mesh:
        """Return the mesh that a user wrote as a `Mesh`, a mapping, or an int (one axis named `tp`)."""
        if isinstance(mesh, Mesh):
            return mesh
        return cls(tuple(mesh.items()) if isinstance(mesh, Mapping) else (("tp", mesh),))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    @property
    def world_size(self) -> int:
        size = 1
        for _, degree in self.axes:
            size *= degree
        return size

    @property
    def model_axis(self) -> str:
        """The axis over which a plan's styles shard layers: `tp`, or the last axis if there is no `tp`."""
        return "tp" if "tp" in self.names else self.names[-1]

    def degree(self, axis: str) -> int:
        return dict(self.axes)[axis]

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
        for name, degree in reversed(self.axes):
            rank, position[name] = divmod(rank, degree)
        return {name: position[name] for name in self.names}

    def split(self, axis: str, outer: int) -> Mesh:
        """Return the mesh with `axis` replaced by two axes: `tp=8` becomes `tp_0=2,tp_1=4`."""
        axes = []
        for name, degree in self.axes:
            axes += [(f"{name}_0", outer), (f"{name}_1", degree // outer)] if name == axis else [(name, degree)]
        return Mesh(tuple(axes), self.group_of_world)

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
        return itertools.product(*([fixed[name]] if name in fixed else range(degree) for name, degree in self.axes))

    def _rank(self, place: Iterable[int]) -> int:
        rank = 0
        for (_, degree), at in zip(self.axes, place, strict=True):
            rank = rank * degree + at
        return rank

    def group_name(self, axes: Sequence[str]) -> str:
        """Return the group's logical process-group name in the graphs, unique among meshes that live in one process.

        Raises:
            UnsupportedError: the group is a part of the running process group, and nobody made a group of that part.
        """
        if self.group_of_world is None:
            return f"{self}:{'.'.join(axes)}"
        if self.size(axes) < self.world_size:
            raise UnsupportedError(
                f"a collective over {'.'.join(axes)} of mesh {self} needs groups inside of the running process group",
                help="use tpcompiler.parallelize and tpcompiler.load, which makes them",
            )
        return self.group_of_world

    def axes_of(self, group_name: str) -> tuple[str, ...]:
        """Return the axes of a group, given a name that `group_name` returned."""
        if group_name == self.group_of_world:
            return self.names
        return tuple(group_name.rpartition(":")[2].split("."))

    def __str__(self) -> str:
        return ",".join(f"{name}={degree}" for name, degree in self.axes)


@lru_cache
def groups_named(name: str) -> tuple[tuple[int, ...], ...]:
    """Return the groups of ranks with a name that `Mesh.group_name` returned; () for any other name."""
    text, _, axes = name.rpartition(":")
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(axis.isidentifier() and degree.isdecimal() for axis, _, degree in pairs):
        return ()
    mesh = Mesh(tuple((axis, int(degree)) for axis, _, degree in pairs))
    return mesh.groups(tuple(axes.split(".")))
