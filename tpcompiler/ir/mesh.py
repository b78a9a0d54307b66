"""The device mesh: named axes with degrees, ranks in row-major order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tpcompiler.errors import MeshError, UnsupportedError

MAX_RANKS = 1 << 16  # more than any group has; a slip such as a hidden size in place of a degree would run for hours


@dataclass(frozen=True)
class Mesh:
    """Named axes and their degrees, e.g. `Mesh((("dp", 2), ("tp", 4)))`; rank = row-major index.

    `group_of_world` names an existing process group that a mesh of one axis runs over, instead of a logical name.

    Raises:
        MeshError: no axes, a repeated or unreadable name, a degree below 1, or more ranks than `MAX_RANKS`.
    """

    axes: tuple[tuple[str, int], ...]
    group_of_world: str | None = None

    def __post_init__(self) -> None:
        names = [name for name, _ in self.axes]
        if not names or len(set(names)) != len(names):
            raise MeshError(
                f"a mesh needs one or more differently named axes, got {names}",
                help='write it as {"tp": 4} or as the integer 4',
            )
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
        """Read a mesh as users write it: an int is one axis named `tp`.

        Raises:
            UnsupportedError: more than one axis (until programs over several axes work).
        """
        if isinstance(mesh, Mesh):
            made = mesh
        elif isinstance(mesh, Mapping):
            made = cls(tuple(mesh.items()))
        else:
            made = cls((("tp", mesh),))
        if len(made.axes) > 1:
            raise UnsupportedError(
                f"mesh {made} has {len(made.axes)} axes; programs over more than one axis are not supported yet",
                help="give one axis, e.g. --tp 4 or {'tp': 4}",
            )
        return made

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    @property
    def world_size(self) -> int:
        size = 1
        for _, degree in self.axes:
            size *= degree
        return size

    def degree(self, axis: str) -> int:
        return dict(self.axes)[axis]

    def coordinate(self, rank: int) -> dict[str, int]:
        """The position of `rank` on each axis.

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

    def group(self, axis: str, rank: int) -> tuple[int, ...]:
        """The ranks that share every coordinate of `rank` but the one on `axis`, in order."""
        here = self.coordinate(rank)
        return tuple(
            other
            for other in range(self.world_size)
            if all(c == here[name] or name == axis for name, c in self.coordinate(other).items())
        )

    def group_name(self, axis: str) -> str:
        """The logical process-group name in the graphs; it tells apart meshes that live in one process."""
        return self.group_of_world or f"{self}:{axis}"

    def __str__(self) -> str:
        return ",".join(f"{name}={degree}" for name, degree in self.axes)
