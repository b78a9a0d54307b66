"""Named axes, ranks in row-major order."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tpcompiler.errors import MeshError, UnsupportedError
from tpcompiler.ir.mesh import Mesh, groups_named

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


def test_a_running_group_is_not_divided() -> None:
    halves = Mesh(Mesh.of(4).axes, group_of_world="0").split("tp", 2)
    assert (halves.axes, halves.parts) == ((("tp", 4),), (("tp[::2]", 2), ("tp[:2]", 2)))
    assert halves.group_name(("tp[::2]", "tp[:2]")) == "0"
    assert halves.axes_of("0") == ("tp[::2]", "tp[:2]")
    with pytest.raises(UnsupportedError, match=r"over tp\[:2\] of mesh tp=4 needs groups inside of the running"):
        halves.group_name(("tp[:2]",))


def test_a_factor_is_named_after_the_ranks_of_its_first_group() -> None:
    """A slice of the axis; its groups follow from the name alone, and all factors together are the axis."""
    mesh = Mesh.of({"dp": 2, "tp": 8}, {"tp": [2, 2, 2]})
    assert mesh.names == ("dp", "tp[::4]", "tp[:4:2]", "tp[:2]")
    assert str(mesh) == "dp=2,tp=8"
    assert mesh.coordinate(13) == {"dp": 1, "tp[::4]": 1, "tp[:4:2]": 0, "tp[:2]": 1}
    for axis, slices in (("tp[::4]", slice(None, None, 4)), ("tp[:4:2]", slice(None, 4, 2)), ("tp[:2]", slice(2))):
        assert mesh.group((axis,), 0) == tuple(range(8))[slices]
    for count in (1, 2, 3, 4):
        for axes in itertools.combinations(mesh.names, count):
            name = mesh.group_name(axes)
            assert (mesh.axes_of(name), groups_named(name)) == (axes, mesh.groups(axes))
    assert mesh.text(mesh.names) == "dp.tp"
    assert mesh.join("tp") == Mesh.of({"dp": 2, "tp": 8})
    for name in ("tp=4:tp[:3]", "tp=4:tp[:0]", "tp=4:tp[0:2]", "tp=4:dp[:2]", "tp=4:tp_0"):
        assert groups_named(name) == ()


def test_only_the_compiler_makes_factors() -> None:
    with pytest.raises(MeshError, match=r"mesh axis 'tp\[:2\]' is not a name"):
        Mesh.of({"tp[:2]": 2})


def test_names_say_which_ranks_are_in_a_group() -> None:
    assert groups_named("dp=2,tp=3:dp") == ((0, 3), (1, 4), (2, 5)) == GRID.groups(("dp",))
    assert groups_named(GRID.group_name(("dp", "tp"))) == ((0, 1, 2, 3, 4, 5),)
    assert groups_named("0") == groups_named("default_pg") == ()
    assert [GRID.index(("dp", "tp"), rank) for rank in range(6)] == list(range(6))
    assert [GRID.index(("tp", "dp"), rank) for rank in range(6)] == [0, 2, 4, 1, 3, 5]
    assert GRID.axes_of("dp=2,tp=3:dp.tp") == GRID.ordered({"tp", "dp"}) == ("dp", "tp")


def test_no_axes() -> None:
    with pytest.raises(MeshError, match=r"a mesh needs one or more differently named axes, got \[\]"):
        Mesh(())


@pytest.mark.parametrize("rank", [-1, 6, True, "0"])
def test_ranks_outside(rank: Any) -> None:
    with pytest.raises(
        MeshError, match=r"rank .* is outside the mesh dp=2,tp=3 of 6 ranks\n  help: use a rank from 0 to 5"
    ):
        GRID.coordinate(rank)
