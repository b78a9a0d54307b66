"""What a cut of one dim means, said in elements: which of them every rank holds."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.ir.drawn import GRID, Cut, cuts
from tpcompiler.ir.dim_sharding import WHOLE, DimSharding
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.sharding import Sharding
from tpcompiler.ir.shares import cut, cut_dim, join, read_sharding, refuse_unlike
from tpcompiler.judge.sound.shares import join as judged_join
from tpcompiler.runtime.records import BoundaryRecord, read_record

DP, TP = DimSharding.by("dp"), DimSharding.by("tp")


def held(by: DimSharding, size: int, mesh: Mesh = GRID) -> list[list[int]]:
    """By rank, the elements that it holds."""
    ranks = range(mesh.world_size)
    return [cut_dim(torch.arange(size), 0, by, mesh, mesh.coordinate(rank)).tolist() for rank in ranks]


@given(cuts())
def test_every_element_is_held_equally_often(drawn: Cut) -> None:
    """By one coordinate of the axes that cut its part, whatever the others are; and sizes count what is held."""
    size, by = drawn
    mine = held(by, size)
    assert [len(own) for own in mine] == [by.local_size(size, GRID, GRID.coordinate(rank)) for rank in range(6)]
    times = torch.bincount(torch.tensor([at for own in mine for at in own]), minlength=size).tolist()
    parts = by.parts or ((size, by),)
    assert times == [6 // GRID.size(how.axes) for length, how in parts for _ in range(length)]


@given(cuts())
def test_runs_are_the_elements_in_order(drawn: Cut) -> None:
    size, by = drawn
    for rank, own in enumerate(held(by, size)):
        runs = by.runs(size, GRID, GRID.coordinate(rank))
        assert [at for run in runs for at in run] == own
        assert all(first.stop < second.start for first, second in itertools.pairwise(runs))


@given(cuts())
def test_even_is_equally_many(drawn: Cut) -> None:
    """It may be so by chance where parts are uneven in turn, but not the other way round."""
    size, by = drawn
    if by.is_even(size, GRID):
        assert len({len(own) for own in held(by, size)}) == 1


@given(cuts(), cuts())
def test_text_is_read_back(first: Cut, second: Cut) -> None:
    for by in (first[1], second[1]):
        sharding = Sharding((WHOLE, by))
        assert read_sharding(sharding.text(GRID), GRID, 2) == sharding
    if set(first[1].axes).isdisjoint(second[1].axes):
        sharding = Sharding((first[1], second[1]))
        assert read_sharding(sharding.text(GRID), GRID, 2) == sharding


@given(cuts())
def test_shares_are_joined(drawn: Cut) -> None:
    size, by = drawn
    value, sharding = torch.arange(2 * size).reshape(2, size), Sharding((WHOLE, by))
    for whole in join([cut(value, sharding, GRID, rank) for rank in range(6)], sharding, GRID, value.shape):
        assert torch.equal(whole, value)


def test_a_part_that_ranks_share_and_one_has_otherwise() -> None:
    """Each rank's elements count, not the last one's: keys and values next to queries that are cut."""
    mesh = Mesh((("tp", 3),))
    sharding = Sharding((DimSharding.of_parts([(6, TP), (2, WHOLE)]),))
    value = torch.arange(8.0)
    parts = [cut(value, sharding, mesh, rank).clone() for rank in range(3)]
    for joined in (join, judged_join):
        assert [whole.tolist() for whole in joined(parts, sharding, mesh, value.shape)] == [value.tolist()]
    refuse_unlike(parts.__getitem__, sharding, mesh, value.shape)
    parts[1][-1] = 9.0
    for joined in (join, judged_join):
        assert [whole[-1].item() for whole in joined(parts, sharding, mesh, value.shape)] == [7.0, 9.0]
    with pytest.raises(ValueError, match="not the same on rank 1 and others, which share parts of it"):
        refuse_unlike(parts.__getitem__, sharding, mesh, value.shape)


@given(st.data())
def test_alike_pieces_are_blocks(data: st.DataObject) -> None:
    """`of_parts` says the same in fewer words, and of the same elements."""
    pieces = data.draw(st.lists(cuts(), min_size=1, max_size=3))
    by = DimSharding.of_parts(pieces)
    at, want = 0, [[] for _ in range(6)]  # type: list[int], list[list[int]]
    for size, how in pieces:
        for rank, own in enumerate(held(how, size)):
            want[rank] += [at + i for i in own]
        at += size
    assert held(by, at) == want
    assert DimSharding.of_parts(by.parts or [(at, by)]) == by


@given(cuts(), st.data())
def test_between_is_what_of_a_range_is_held(drawn: Cut, data: st.DataObject) -> None:
    size, by = drawn
    start, stop = sorted(data.draw(st.lists(st.integers(0, size), min_size=2, max_size=2)))
    piece = by.slice(start, stop, size)
    if piece is not None and start < stop:
        inside = [[at - start for at in own if start <= at < stop] for own in held(by, size)]
        assert held(piece, stop - start) == inside
    assert by.slice(0, size, size) == by


@given(cuts(), st.integers(2, 4))
def test_scaled_and_divided(drawn: Cut, times: int) -> None:
    size, by = drawn
    wide = by.scale(times, size, GRID)
    assert held(wide, size * times) == [[at * times + i for at in own for i in range(times)] for own in held(by, size)]
    back = wide.unscale(times, size * times, GRID)
    needless = any(how.is_even(n, GRID) and how.levels[0].unit > 1 for n, how in by.parts or [drawn] if how.levels)
    assert back is not None or needless  # units that even cuts do not need are not found again
    assert back is None or held(back, size) == held(by, size)
    narrow = by.unscale(times, size, GRID)
    if narrow is not None:
        want = [[at * times + i for at in own for i in range(times)] for own in held(narrow, size // times)]
        assert held(by, size) == want


@given(cuts())
def test_an_axis_with_and_without(drawn: Cut) -> None:
    _, by = drawn
    for axis in GRID.names:
        assert set(by.drop_axis(axis).axes) == set(by.axes) - {axis}
        assert set(by.axis_part(axis).axes) == set(by.axes) & {axis}
        assert by.drop_axis(axis).axis_part(axis) == WHOLE


def test_inside_is_a_cut_of_what_is_left() -> None:
    assert DP.nest(TP) == DimSharding.by("dp", "tp") != TP.nest(DP)
    assert held(DP.nest(TP), 6) == [[0], [1], [2], [3], [4], [5]]
    assert held(TP.nest(DP), 6) == [[0], [2], [4], [1], [3], [5]]
    assert WHOLE.nest(TP) == TP == TP.nest(WHOLE)
    parts = DimSharding.of_parts([(6, DP), (3, WHOLE)])
    assert parts.nest(DimSharding.of_parts([(6, TP), (3, TP)])) == DimSharding.of_parts([(6, DP.nest(TP)), (3, TP)])
    assert parts.nest(DimSharding.of_parts([(5, TP), (4, WHOLE)])) == parts


def test_an_axis_that_is_two() -> None:
    """Even cuts are the same elements; of three axes, the ones made of `tp` lie where it lay."""
    mesh = Mesh((("dp", 2), ("tp", 4)))
    split = mesh.split("tp", 2)
    for by in (TP, DP.nest(TP), TP.nest(DP), DimSharding.by("tp", block=8, unit=2)):
        assert held(by.split_axis("tp", split.parts_of("tp")), 16, split) == held(by, 16, mesh)
        assert Sharding((by.split_axis("tp", split.parts_of("tp")),)).text(split) == Sharding((by,)).text(mesh)
    parts = DimSharding.of_parts([(8, TP), (8, DP)])
    assert held(parts.split_axis("tp", split.parts_of("tp")), 16, split) == held(parts, 16, mesh)


def test_an_empty_part_is_none() -> None:
    """It was printed as a part of no elements, which nothing reads."""
    parts = [(0, WHOLE), (4, TP), (0, DP), (3, WHOLE)]
    assert DimSharding.of_parts(parts) == DimSharding.of_parts([(4, TP), (3, WHOLE)])
    assert DimSharding.of_parts([(0, TP), (5, WHOLE)]) == DimSharding.of_parts([(0, TP)]) == WHOLE


SHARED = Mesh.of({"dp": 2, "tp": 4}, {"tp": [2, 2]})


@given(cuts(SHARED), st.sampled_from(["", "tp[::2]", "tp[:2]", "both"]), st.sampled_from(["sum", "max"]))
def test_the_text_of_factors_is_read_back(drawn: Cut, pending: str, op: str) -> None:
    """Of one sharding or another: over both factors alike as over the axis, else of each."""
    parts = SHARED.parts_of("tp") if pending == "both" else (pending,) if pending else ()
    sharding = Sharding((drawn[1],), tuple(sorted((part, op) for part in parts if part not in drawn[1].axes)))
    text = sharding.text(SHARED)
    assert read_sharding(text, SHARED, 1) == sharding
    assert read_record(BoundaryRecord, {"name": "x", "shape": [1], "dtype": "f32", "sharding": text})
    joined, mesh = sharding.join_factors(SHARED)
    assert ("2x" in text) is bool(mesh.factors)
    assert joined.axes <= {*mesh.names}


def test_factors_that_the_mesh_does_not_have() -> None:
    for text in ("4xS(0) 2xR", "2xS(0) 2xR", "2xS(0)", "[R, 2xR 2xR]"):
        with pytest.raises(ValueError, match=r"has other factors|is no sharding|zip\(\)"):
            read_sharding(text, Mesh.of(4), 1)
    with pytest.raises(ValueError, match=r"'4xS\(0\) 1xR' has other factors than the mesh"):
        read_sharding("4xS(0) 1xR", Mesh.of(4, {"tp": [2, 2]}), 1)
