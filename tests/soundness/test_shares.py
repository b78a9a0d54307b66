"""The check's own arithmetic of shares: what docs/sharding.md draws, and what the compiler cuts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.export import export

import tpcompiler
from tests.sound import findings
from tpcompiler.errors import TpCompilerError
from tpcompiler.ir import shares
from tpcompiler.ir.dim_sharding import DimSharding
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.sharding import Sharding
from tpcompiler.ir.shares import read_sharding, same_bits
from tpcompiler.judge.sound.shares import cut, join, local_shape, runs_of

GRID = Mesh((("dp", 2), ("tp", 4)))
PLACEMENTS = (
    "R",
    "S(0)",
    "S(1)",
    "S(1, unit 2)",
    "S(0, unit 4)",
    "S(1, block 4)",
    "S(1, block 8)",
    "S(1, block 8, unit 2)",
    "S(1, parts 8 4 4)",
    "P(sum)",
    "P(product)",
    "P(max)",
)


@pytest.mark.parametrize(
    ("placement", "size", "held"),
    [
        ("S(0)", 8, [[0, 1, 2], [3, 4, 5], [6, 7]]),
        ("S(0)", 4, [[0, 1], [2, 3], []]),
        ("S(0, unit 2)", 8, [[0, 1, 2, 3], [4, 5, 6, 7], []]),
        ("S(0, block 4)", 8, [[0, 1, 4, 5], [2, 3, 6, 7], []]),
        ("S(0, parts 5 3)", 8, [[0, 1, 5], [2, 3, 6], [4, 7]]),
    ],
)
def test_what_each_of_three_ranks_holds(placement: str, size: int, held: list[list[int]]) -> None:
    mesh = Mesh((("tp", 3),))
    by = read_sharding(placement, mesh, 1).dims[0]
    assert [[e for run in runs_of(by, size, mesh, {"tp": rank}) for e in run] for rank in range(3)] == held


def test_it_cuts_as_the_compiler_does() -> None:
    """On one axis and on two, of which one may cut what the other leaves; and both put together what both cut."""
    count = simpler = 0
    value = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    for dp in PLACEMENTS:
        for tp in PLACEMENTS:
            try:
                sharding = read_sharding(f"[{dp}, {tp}]", GRID, 2)
                theirs = [shares.cut(value, sharding, GRID, rank) for rank in range(8)]
            except (TpCompilerError, RuntimeError):  # two cuts that no dim can have
                continue
            if any(by.find_misfit(size, GRID) for by, size in zip(sharding.dims, value.shape, strict=True)):
                continue
            ours = [cut(value, sharding, GRID, rank) for rank in range(8)]
            assert all(map(same_bits, ours, theirs)), sharding
            assert [tuple(each.shape) for each in ours] == [
                local_shape(sharding, value.shape, GRID, GRID.coordinate(rank)) for rank in range(8)
            ]
            if "P(max)" not in (dp, tp):
                assert all(same_bits(whole, value) for whole in join(theirs, sharding, GRID, value.shape)), sharding
            count += 1
            simple = Sharding(
                tuple(by.simplify(size, GRID) for by, size in zip(sharding.dims, value.shape, strict=True))
            )
            held = [cut(value, replace(simple, partial=sharding.partial), GRID, rank) for rank in range(8)]
            assert all(map(same_bits, ours, held)), sharding
            simpler += simple.dims != sharding.dims
    assert count > 40
    assert simpler


@pytest.mark.parametrize(("op", "made"), [("sum", 6.0), ("avg", 2.0), ("product", 6.0), ("max", 3.0), ("min", 1.0)])
def test_what_is_pending(op: str, made: float) -> None:
    mesh = Mesh((("tp", 3),))
    parts = [torch.tensor([value]) for value in (3.0, 1.0, 2.0)]
    assert [whole.tolist() for whole in join(parts, read_sharding(f"P({op})", mesh, 1), mesh, [1])] == [[made]]


@pytest.mark.slow
def test_a_share_of_another_size() -> None:
    mesh = Mesh((("tp", 2),))
    with pytest.raises(ValueError, match=r"rank 1 holds \[3\] of \[4\] as S\(0\)"):
        join([torch.ones(2), torch.ones(3)], read_sharding("S(0)", mesh, 1), mesh, [4])


def test_a_block_that_is_a_whole_piece_is_none() -> None:
    """Over tp alone 24 rows are cut in blocks of 12; each rank of dp has one of them, and the two names are one."""
    program = export(nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1)), (torch.randn(24, 4),))
    made = tpcompiler.parallelize(program, {"dp": 2, "tp": 2}, {}, inputs=[{"dp": "S(0)", "tp": "S(0, block 12)"}])
    assert made.manifest().inputs[0].sharding == "[S(0), S(0)]"
    assert findings(made) == []
    of_an_axis = DimSharding.by("dp").nest(DimSharding.by("tp", block=12))
    assert of_an_axis.simplify(24, GRID) == DimSharding.by("dp", "tp") != of_an_axis.simplify(48, GRID)
