"""Named axes, ranks in row-major order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tpcompiler.errors import MeshError
from tpcompiler.ir.mesh import Mesh

GRID = Mesh((("dp", 2), ("tp", 3)))


def test_as_users_write_it() -> None:
    assert Mesh.of(4) == Mesh.of({"tp": 4}) == Mesh.of(Mesh((("tp", 4),))) == Mesh((("tp", 4),))
    assert str(GRID) == "dp=2,tp=3"
    assert (GRID.names, GRID.world_size, GRID.degree("tp")) == (("dp", "tp"), 6, 3)


def test_coordinates_are_those_of_an_array_of_ranks() -> None:
    ranks = torch.arange(6).view(2, 3)
    for rank in range(6):
        here = GRID.coordinate(rank)
        assert ranks[here["dp"], here["tp"]] == rank
        assert list(here) == ["dp", "tp"]


def test_groups_are_the_lines_of_the_array() -> None:
    assert [GRID.group(("tp",), rank) for rank in (0, 4)] == [(0, 1, 2), (3, 4, 5)]
    assert [GRID.group(("dp",), rank) for rank in (0, 4)] == [(0, 3), (1, 4)]


def test_group_names_tell_meshes_apart() -> None:
    assert Mesh.of(4).group_name(("tp",)) == "tp=4:tp" != Mesh.of(2).group_name(("tp",))
    assert Mesh(Mesh.of(4).axes, group_of_world="0").group_name(("tp",)) == "0"


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ((), "a mesh needs one or more differently named axes, got []"),
        ((("tp", 2), ("tp", 2)), "a mesh needs one or more differently named axes, got ['tp', 'tp']"),
        ((("a b", 2),), "mesh axis 'a b' is not a name"),
        ((("tp", 0),), "mesh axis 'tp' has degree 0"),
        ((("tp", True),), "mesh axis 'tp' has degree True"),
        ((("tp", 2.0),), "mesh axis 'tp' has degree 2.0"),
    ],
)
def test_malformed(axes: Any, message: str) -> None:
    with pytest.raises(MeshError) as error:
        Mesh(axes)
    assert error.value.message == message
    assert error.value.help


@pytest.mark.parametrize("rank", [-1, 6, True, "0"])
def test_ranks_outside(rank: Any) -> None:
    with pytest.raises(
        MeshError, match=r"rank .* is outside the mesh dp=2,tp=3 of 6 ranks\n  help: use a rank from 0 to 5"
    ):
        GRID.coordinate(rank)
