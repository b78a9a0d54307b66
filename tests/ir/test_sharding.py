"""How a tensor is laid out: ranges, shapes, text, and back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard

from tpcompiler.errors import ShardingError, UnsupportedError
from tpcompiler.ir.constraints import Constraint, Over
from tpcompiler.ir.dim_sharding import WHOLE, DimSharding, chunk
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.placements import PlacementSpec, parse_placement
from tpcompiler.ir.sharding import Sharding
from tpcompiler.ir.shares import cut, fitted, join, read_sharding

TP = Mesh((("tp", 4),))
GRID = Mesh((("dp", 2), ("tp", 4)))


@given(st.integers(0, 40), st.integers(1, 8))
def test_chunks_are_torchs(size: int, degree: int) -> None:
    """`torch.chunk` gives fewer chunks where some would be empty."""
    pieces = [piece.tolist() for piece in torch.arange(size).chunk(degree)] if size else []
    pieces += [[]] * (degree - len(pieces))
    mine = [chunk(size, degree, index) for index in range(degree)]
    assert [list(range(start, start + length)) for start, length in mine] == pieces


@given(st.integers(0, 12), st.integers(1, 6), st.integers(1, 5))
def test_chunks_in_units_cover_everything_once(units: int, degree: int, unit: int) -> None:
    mine = [chunk(units * unit, degree, index, unit) for index in range(degree)]
    assert [at for start, length in mine for at in range(start, start + length)] == list(range(units * unit))
    assert all(length % unit == 0 for _, length in mine)


@pytest.mark.parametrize(
    ("spec", "mesh", "text"),
    [
        (Replicate(), TP, "R"),
        (Shard(1), TP, "S(1)"),
        (Shard(-1), TP, "S(2)"),
        (Partial("max"), TP, "P(max)"),
        ({"tp": Shard(0)}, TP, "S(0)"),
        ({}, TP, "R"),
        ({"tp": Shard(0)}, GRID, "[R, S(0)]"),
        ({"tp": Partial(), "dp": Shard(2)}, GRID, "[S(2), P(sum)]"),
        ({"tp": Shard(0), "dp": Shard(0)}, GRID, "[S(0), S(0)]"),
        ({"tp": Partial(), "dp": Partial("avg")}, GRID, "[P(avg), P(sum)]"),
    ],
)
def test_text(spec: PlacementSpec, mesh: Mesh, text: str) -> None:
    assert Sharding.of(spec, mesh, 3, "a test").text(mesh) == text


def test_a_unit_is_printed_and_read_back() -> None:
    sharding = Sharding((WHOLE, DimSharding.by("tp", unit=4)))
    assert sharding.text(TP) == "S(1, unit 4)"
    for text in ("R", "S(1)", "P(sum)", "S(1, unit 4)", "S(1, block 1)", "S(1, block 8)", "S(1, unit 2, block 6)"):
        assert read_sharding(text, TP, 2).text(TP) == text


@pytest.mark.parametrize(("block", "even"), [(0, True), (8, True), (4, True), (6, False), (2, False)])
def test_blocks_are_even_each_by_itself(block: int, even: bool) -> None:
    """24 elements in blocks, over 4 ranks."""
    by = DimSharding.by("tp", block=block)
    sizes = {by.local_size(24, TP, {"tp": rank}) for rank in range(4)}
    assert by.is_even(24, TP) is even is (len(sizes) == 1)


@pytest.mark.parametrize(
    ("spec", "mesh", "message"),
    [
        (
            Shard(3),
            TP,
            "cannot shard a test on dim 3: it has 3 dims\n  help: use a dim from -3 to 2\n  asked by: line 4",
        ),
        (
            {"pp": Shard(0)},
            TP,
            "a test names mesh axis 'pp', which the mesh (tp=4) does not have\n  help: use one of tp\n  asked by: line 4",
        ),
        (
            Shard(0),
            GRID,
            "a test has one placement, S(0), on a mesh of 2 axes (dp=2,tp=4)\n"
            "  help: give one placement per axis, {axis: placement}\n  asked by: line 4",
        ),
        (
            {"dp": Partial(), "tp": Partial("max")},
            GRID,
            "a test cannot be P(sum) over 'dp' and P(max) over 'tp': what that is depends on the order of the reductions\n"
            "  help: reduce over one of the axes first: place it as R there\n  asked by: line 4",
        ),
    ],
)
def test_what_a_tensor_cannot_be(spec: PlacementSpec, mesh: Mesh, message: str) -> None:
    with pytest.raises(ShardingError) as error:
        Sharding.of(spec, mesh, 3, "a test", "line 4")
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"tp": "S(0, parts 8 8)"}, "[R, S(0, block 8)]"),
        ({"dp": "S(0, parts 8 8r)", "tp": "S(0, parts 8r 8)"}, "[S(0, parts 8 8r), S(0, parts 8r 8)]"),
        ({"dp": "S(-1)", "tp": "S(0, outside dp)"}, "[S(0), S(0, outside dp)]"),
        ({"dp": "S(0)", "tp": "S(0, block 4)"}, "[S(0), S(0, block 4)]"),
        ({"tp": "S(0, block 16)"}, "[R, S(0)]"),
        ({"dp": "S(0, unit 4)"}, "[S(0), R]"),
        ({"tp": "S(0, parts 12u4 4)"}, "[R, S(0, parts 12u4 4)]"),
        ({"tp": "S(0, parts 12r 4r)"}, "[R, R]"),
    ],
)
def test_placements_as_they_are_printed(given: dict[str, str], text: str) -> None:
    """For a tensor of 16, in the simplest form."""
    spec = {axis: parse_placement(placement) for axis, placement in given.items()}
    sharding = fitted(Sharding.of(spec, GRID, 1, "a test"), (16,), GRID, "a test")
    assert sharding.text(GRID) == text
    whole = torch.arange(16.0)
    parts = [cut(whole, sharding, GRID, rank) for rank in range(8)]
    assert all(torch.equal(each, whole) for each in join(parts, sharding, GRID, (16,)))


OTHERWISE = "give the same parts for all axes of a dim, with an r behind what an axis leaves whole"
FITS = "give parts that add up to 16, units and blocks that divide it, or S(0) alone"


@pytest.mark.parametrize(
    ("given", "message", "help"),
    [
        ({"dp": "S(0)", "tp": "S(0, parts 8 8)"}, "as S(0, parts 8 8) on 'tp': the axes before it", OTHERWISE),
        ({"dp": "S(0, parts 8 8)", "tp": "S(0)"}, "as S(0) on 'tp': the axes before it", OTHERWISE),
        ({"dp": "S(0, parts 8 8)", "tp": "S(0, parts 8 4 4)"}, "as S(0, parts 8 4 4) on 'tp'", OTHERWISE),
        ({"tp": "S(0, outside dp)"}, "as S(0, outside dp) on 'tp': the axes before it cut dim 0 otherwise", OTHERWISE),
        ({"tp": "S(0, parts 8 4)"}, "its dim 0 is 16, and the parts add up to 12", FITS),
        ({"tp": "S(0, parts 8u3 8)"}, "its dim 0 is 16, and 8 elements have no units of 3", FITS),
        ({"tp": "S(0, block 5)"}, "its dim 0 is 16, and 16 elements have no blocks of 5", FITS),
        ({"tp": "S(0, unit 3, block 8)"}, "its dim 0 is 16, and 8 elements have no units of 3", FITS),
        ({"dp": "S(0)", "tp": "S(0, block 3)"}, "its dim 0 is 16, and 8 elements have no blocks of 3", FITS),
    ],
)
def test_cuts_that_a_dim_cannot_have(given: dict[str, str], message: str, help: str) -> None:
    spec = {axis: parse_placement(placement) for axis, placement in given.items()}
    with pytest.raises(ShardingError) as error:
        fitted(Sharding.of(spec, GRID, 1, "a test", "line 4"), (16,), GRID, "a test", "line 4")
    assert str(error.value).startswith("cannot place a test as ")
    assert message in str(error.value)
    assert str(error.value).endswith(f"\n  help: {help}\n  asked by: line 4")


def test_a_tensor_without_dims_is_not_cut() -> None:
    with pytest.raises(ShardingError, match=r"cannot shard a test on dim 0: it has 0 dims\n  help: pin it to R"):
        Sharding.of(Shard(0), TP, 0, "a test")


def test_a_subclass_of_shard_may_mean_anything() -> None:
    class Strided(Shard):
        pass

    with pytest.raises(UnsupportedError, match="of a test is not supported"):
        Sharding.of(Strided(0), TP, 1, "a test")


def test_the_outer_axis_cuts_first() -> None:
    """As in torch: rank 5 of a 2 x 4 mesh has the second part of the second half."""
    sharding = Sharding.of({"dp": Shard(0), "tp": Shard(0)}, GRID, 1, "a test")
    assert [sharding.dims[0].share(16, GRID, GRID.coordinate(rank)) for rank in range(8)] == [
        (2 * rank, 2) for rank in range(8)
    ]


@pytest.mark.parametrize(
    ("sharding", "shape", "even"),
    [
        (Sharding.of(Shard(0), TP, 2, ""), (8, 3), True),
        (Sharding.of(Shard(0), TP, 2, ""), (6, 4), False),
        (Sharding.of(Shard(1), TP, 2, ""), (6, 4), True),
        (Sharding((DimSharding.by("tp", unit=2), WHOLE)), (8, 3), True),
        (Sharding((DimSharding.by("tp", unit=4), WHOLE)), (8, 3), False),
        (Sharding.of({"dp": Shard(0), "tp": Shard(0)}, GRID, 1, ""), (12,), False),
        (Sharding.replicated(1), (7,), True),
    ],
)
def test_even(sharding: Sharding, shape: tuple[int, ...], even: bool) -> None:
    mesh = GRID if "dp" in sharding.axes else TP
    shapes = {sharding.local_shape(shape, mesh, mesh.coordinate(rank)) for rank in range(mesh.world_size)}
    assert sharding.is_even(shape, mesh) == (len(shapes) == 1) == even


def test_axes_and_reductions() -> None:
    sharding = Sharding.of({"dp": Shard(1), "tp": Partial()}, GRID, 2, "a test")
    assert sharding.axes == {"dp", "tp"}
    assert not sharding.is_replicated
    assert sharding.without_partial.text(GRID) == "[S(1), R]"
    assert Sharding.replicated(2).is_replicated


@pytest.mark.parametrize(
    "text",
    [
        "R",
        "S(0)",
        "S(1)",
        "S(1, unit 3)",
        "S(1, block 3)",
        "S(1, unit 2, block 6)",
        "P(sum)",
        "P(avg)",
        "P(max)",
        "P(min)",
        "P(product)",
    ],
)
def test_shares_make_the_whole(text: str) -> None:
    value = torch.randn(5, 6, dtype=torch.float64)
    sharding = read_sharding(text, TP, 2)
    parts = [cut(value, sharding, TP, rank) for rank in range(4)]
    assert all(part.is_contiguous() for part in parts)
    wholes = join(parts, sharding, TP, value.shape)
    assert len(wholes) == (4 if text == "R" else 1)
    for whole in wholes:
        torch.testing.assert_close(whole, value)


def test_sums_of_integers_keep_their_dtype() -> None:
    value = torch.arange(6, dtype=torch.int32)
    for text in ("P(sum)", "P(product)"):
        sharding = read_sharding(text, TP, 1)
        (whole,) = join([cut(value, sharding, TP, rank) for rank in range(4)], sharding, TP, value.shape)
        assert whole.dtype is torch.int32
        assert torch.equal(whole, value)


def test_shares_of_another_shape_are_refused() -> None:
    sharding = read_sharding("S(0)", TP, 1)
    with pytest.raises(ValueError, match=r"rank 3 holds \[1\] of \[6\] as S\(0\)"):
        join([torch.zeros(2), torch.zeros(2), torch.zeros(2), torch.zeros(1)], sharding, TP, (6,))


def test_placements_are_torchs() -> None:
    sharding = Sharding.of({"dp": Shard(1), "tp": Partial("avg")}, GRID, 2, "a test")
    assert sharding.placements(GRID) == (Shard(1), Partial("avg"))


def test_a_pin_on_one_axis_beside_what_waits_on_another() -> None:
    have = Sharding.of({"dp": Partial()}, GRID, 1, "a test")
    for op, text in (("avg", "[P(sum), P(avg)]"), ("max", None)):
        asked = Constraint(Over((Sharding.of({"tp": Partial(op)}, GRID, 1, "a test"),), ("tp",)), "line 4")
        if text is None:
            with pytest.raises(
                ShardingError, match=r"P\(sum\) over 'dp' and P\(max\) over 'tp'.*\n.*\n  asked by: line 4"
            ):
                asked.apply(have)
        else:
            assert asked.apply(have).text(GRID) == text


def test_the_nesting_of_axes_in_parts_is_printed_and_read_back() -> None:
    inner = DimSharding.by("tp", "dp")
    sharding = Sharding((DimSharding.of_parts([(16, inner), (8, DimSharding.by("tp"))]),))
    assert sharding.text(GRID) == "[S(0, parts 16 8r), S(0, parts 16<dp 8)]"
    assert read_sharding(sharding.text(GRID), GRID, 1) == sharding


def test_the_rank_that_holds_most_is_not_always_the_first() -> None:
    rows = DimSharding.by("tp").with_spans([(0, 5), (3, 9), (7, 13), (11, 16)])  # under windows
    sharding = Sharding.replicated(2).with_dim(0, rows)
    assert [sharding.local_bytes((16, 5), 4, TP, rank) for rank in range(4)] == [100, 120, 120, 100]
    assert sharding.local_bytes((16, 5), 4, TP) == 120
