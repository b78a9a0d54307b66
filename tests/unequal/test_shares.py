"""Axes whose ranks hold unequal shares: how units are dealt, and how such a mesh is written."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import tpcompiler
from tests.passes.stages import Call
from tests.sound import findings
from tpcompiler.errors import MeshError, UnsupportedError
from tpcompiler.ir.dim_sharding import DimSharding, apportion, chunk
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.sharding import Sharding
from tpcompiler.ir.shares import cut, join, read_sharding
from tpcompiler.judge.sound import shares as judged

SHARES = st.lists(st.integers(1, 9), min_size=2, max_size=5).map(lambda own: sorted(own, reverse=True))


@given(st.integers(0, 60), SHARES)
def test_no_other_whole_numbers_are_nearer(units: int, shares: list[int]) -> None:
    dealt, exact = apportion(units, tuple(shares)), [units * share / sum(shares) for share in shares]

    def far(counts: Any) -> float:
        return max(abs(count - part) for count, part in zip(counts, exact, strict=True))

    assert sum(dealt) == units
    assert list(dealt) == sorted(dealt, reverse=True)
    moved = (
        [count + (at == to) - (at == of) for at, count in enumerate(dealt)]
        for of, to in itertools.permutations(range(len(shares)), 2)
    )
    assert all(far(other) >= far(dealt) - 1e-9 for other in moved)


@given(st.integers(0, 40), SHARES, st.integers(1, 4))
def test_chunks_are_whole_units_in_a_row(units: int, shares: list[int], unit: int) -> None:
    chunks = [chunk(units * unit, tuple(shares), rank, unit) for rank in range(len(shares))]
    assert [start for start, _ in chunks] == [sum(size for _, size in chunks[:at]) for at in range(len(chunks))]
    assert [size for _, size in chunks] == [unit * count for count in apportion(units, tuple(shares))]


@given(st.integers(1, 30), SHARES, st.integers(1, 3))
def test_the_judge_deals_as_the_compiler_does(units: int, shares: list[int], unit: int) -> None:
    mesh, by = Mesh.of({"tp": shares}), DimSharding.by("tp", unit=unit)
    size = units * unit
    for rank in range(mesh.world_size):
        here = mesh.coordinate(rank)
        assert judged.local_size(by, size, mesh, here) == by.local_size(size, mesh, here)
        assert judged.runs_of(by, size, mesh, here) == by.runs(size, mesh, here)


@pytest.mark.parametrize(
    ("text", "mesh", "sizes"),
    [
        ("S(0)", {"tp": [2, 1, 1]}, [4, 2, 2]),
        ("S(0)", {"tp": [3, 2, 1]}, [4, 3, 1]),  # 4, 2.67 and 1.33
        ("S(0, unit 2)", {"tp": [3, 2, 1]}, [4, 2, 2]),  # of 4 units 2, 1.33 and 0.67
        ("S(0, block 4)", {"tp": [2, 1, 1]}, [4, 2, 2]),
        ("[S(0), S(0)]", {"dp": 2, "tp": [3, 1]}, [3, 1, 3, 1]),
        ("S(0, parts 4 4r)", {"tp": [2, 1, 1]}, [6, 5, 5]),
    ],
)
def test_shares_join_to_the_whole(text: str, mesh: dict[str, Any], sizes: list[int]) -> None:
    over, whole = Mesh.of(mesh), torch.arange(24.0).view(8, 3)
    sharding = read_sharding(text, over, 2)
    parts = [cut(whole, sharding, over, rank) for rank in range(over.world_size)]
    assert [len(part) for part in parts] == sizes
    assert all(torch.equal(one, whole) for one in join(parts, sharding, over, whole.shape))


def test_a_mesh_as_users_write_it() -> None:
    mesh = Mesh.of({"dp": 2, "tp": [4, 2, 2]})
    assert (str(mesh), mesh.world_size, mesh.degree("tp")) == ("dp=2,tp=2:1:1", 6, 3)
    assert mesh.written == {"dp": 2, "tp": [2, 1, 1]}
    assert Mesh.of(mesh.written) == mesh != Mesh.of({"dp": 2, "tp": 3})
    assert Mesh.of({"tp": [5, 5]}) == Mesh.of(2)
    assert mesh.along(["tp"]) == Mesh.of({"tp": [2, 1, 1]})
    assert mesh.group_name(["tp"]) == "dp=2,tp=3:tp"
    assert mesh.axes_of("dp=2,tp=3:tp") == ("tp",)


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ([1, 2], "mesh axis 'tp' has the shares 1:2"),
        ([2, 0], r"mesh axis 'tp' has the shares \[2, 0\]"),
        ([2, 1.5], r"mesh axis 'tp' has the shares \[2, 1.5\]"),
        ([], r"mesh axis 'tp' has the shares \[\]"),
    ],
)
def test_shares_that_are_none(shares: list[Any], message: str) -> None:
    with pytest.raises(MeshError, match=message):
        Mesh.of({"tp": shares})


def test_an_exact_cut_is_not_even() -> None:
    """Ranks then hold their shares whatever the units are, and they are not alike."""
    mesh, by = Mesh.of({"tp": [2, 1, 1]}), DimSharding.by("tp")
    assert by.is_exact(8, mesh)
    assert not by.is_even(8, mesh)
    assert not by.is_exact(6, mesh)
    assert not Sharding((by,)).is_even([8], mesh)


class Merging(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + x).flatten(0, 1)


@pytest.mark.parametrize("shares", [[2, 1, 1], [3, 1]], ids=str)
def test_unequal_rows_of_a_dynamic_length_are_not_merged(shares: list[int]) -> None:
    """They are gathered before: a rank's share of the merged dim would be of a dynamic size."""
    x = torch.arange(48).reshape(4, 12)
    exported = torch.export.export(Merging(), (x,), dynamic_shapes=({1: torch.export.Dim("length")},))
    program = tpcompiler.parallelize(exported, {"tp": shares}, {}, inputs={"x": "S(0)"})
    assert [each.kind for each in program.collectives()] == ["all_gather"]
    assert program.verify((x,)).ok
    assert program.verify((x[:, :8],)).ok


def test_a_dynamic_dim_is_not_cut() -> None:
    rows = {0: torch.export.Dim("rows")}
    exported = torch.export.export(
        torch.nn.Sequential(torch.nn.Linear(4, 8)), (torch.ones(6, 4),), dynamic_shapes=(rows,)
    )
    message = r"cannot shard input 'input' on dim 0: its size s\d+ is dynamic, and tp=2:1 has unequal shares"
    with pytest.raises(UnsupportedError, match=message):
        tpcompiler.parallelize(exported, {"tp": [2, 1]}, {}, inputs=["S(0)"])
    program = tpcompiler.parallelize(exported, {"tp": [2, 1]}, {"0": "colwise"}, outputs=["S(1)"])
    assert program.verify((torch.ones(5, 4),)).ok


@pytest.mark.sample(1)
@pytest.mark.parametrize("mesh", [{"tp": [2, 1]}, {"tp": [3, 2, 1]}, {"dp": 2, "tp": [2, 1]}], ids=str)
@pytest.mark.parametrize("use", [lambda y: y, lambda y: y.roll(3, -1), lambda y: y[:, 2:-3]], ids=["", "roll", "slice"])
def test_parts_on_unequal_ranks_are_gathered(use: Any, mesh: dict[str, Any]) -> None:
    torch.manual_seed(0)
    parts = {"a": nn.Linear(8, 6), "c": nn.Linear(8, 12)}
    module = Call(lambda self, x: use(torch.cat([self.a(x), self.c(x)], -1)), **parts)
    program = torch.export.export(module, (x := torch.randn(4, 8),))
    converted = tpcompiler.parallelize(program, mesh, {"a": "colwise", "c": "colwise"})
    assert converted.verify((x,)).ok
    assert [each.kind for each in converted.collectives()] == ["all_gather"]
    assert findings(converted) == []


@pytest.mark.slow
def test_other_axes_keep_their_shares_where_degrees_are_tried() -> None:
    program = torch.export.export(nn.Linear(8, 12), (torch.randn(6, 8),))
    axes: dict[str, Any] = {"dp": [2, 1]}
    found = tpcompiler.diagnose(program, other_axes=axes)
    assert [each.mesh for each in found.meshes.values()][:2] == [{"dp": [2, 1], "tp": 1}, {"dp": [2, 1], "tp": 2}]
