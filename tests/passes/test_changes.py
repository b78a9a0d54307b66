"""Every change between shardings of several mesh axes, run on all ranks: whole again, bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from tests.long import some
from tests.passes.changes import program_of, wrong_changes
from tpcompiler.cost.machine import Link, Machine
from tpcompiler.cost.path import WIRE, steps_between
from tpcompiler.ir.dim_sharding import DimSharding, Level
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.placements import REDUCE_OPS
from tpcompiler.ir.sharding import Sharding
from tpcompiler.ir.shares import read_sharding
from tpcompiler.parallel.partition import ranks_alike
from tpcompiler.passes import lower_reshards as lowering

SQUARE, WIDE, CUBE = Mesh((("dp", 2), ("tp", 2))), Mesh((("dp", 2), ("tp", 3))), Mesh((("a", 2), ("b", 2), ("c", 2)))

FEW = ["[R, R]", "[S(0), R]", "[S(1), S(0)]", "[S(0), S(0)]", "[S(0), S(0, outside dp)]", "[P(sum), S(1)]"]
PLAIN = [f"[{dp}, {tp}]" for dp in ("R", "S(0)", "S(1)", "P(sum)") for tp in ("R", "S(0)", "S(1)", "P(sum)")]
NESTED = ["[S(0), S(0, outside dp)]", "[S(1), S(1, outside dp)]"]
BLOCKS = [
    "[R, R]",
    "[S(1), R]",
    "[S(0), S(0)]",
    "[S(0, unit 2), S(0, unit 2)]",
    "[R, S(0, block 6)]",
    "[S(0), S(0, block 6)]",
    "[S(0, block 6), S(0)]",
    "[S(0, block 6), P(sum)]",
    "[S(1), S(0, unit 2, block 6)]",
    "[S(0, block 4), S(1, block 2)]",
]
PARTS = [
    "[R, R]",
    "[S(0), S(0)]",
    "[P(sum), S(1)]",
    "[R, S(0, parts 4 4r 4)]",
    "[S(0, parts 4r 8), S(0, parts 4 8r)]",
    "[S(0, parts 4 8), S(0, parts 4 8)]",
    "[S(0, parts 4 8r), S(0, parts 4 8)]",
    "[S(1), S(0, parts 4 8r)]",
    "[S(0, parts 4 8r), P(sum)]",
    "[S(0, parts 6u3 6), R]",
    "[S(0, parts 1 11), S(0, parts 1 11)]",
]


REDUCED = [
    f"[{dp}, {tp}]" for op in REDUCE_OPS for dp, tp in ((f"P({op})", "R"), (f"P({op})",) * 2, ("S(0)", f"P({op})"))
]


MIXED = ["[R, R]", "[S(0), S(0)]", "[P(sum), P(avg)]", "[P(avg), P(sum)]", *REDUCED]


def wrong(
    texts: Sequence[str],
    mesh: Mesh,
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float64,
    every: int = 1,
    machine: Machine = WIRE,
) -> list[str]:
    """Multiples of 8 of both signs: an eighth of one is exact, and a zero that a max meets is not the largest."""
    value = (8 * torch.arange(torch.Size(shape).numel()).reshape(shape) - 20).to(dtype)
    states = [read_sharding(text, mesh, len(shape)) for text in texts]
    return wrong_changes(some(itertools.product(states, repeat=2), every), mesh, value, machine)


@pytest.mark.slow
def test_a_few_of_all() -> None:
    assert wrong(FEW, SQUARE, (5, 3)) == []


@pytest.mark.slow
@pytest.mark.sweep(3)
@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter", "all_to_all"])
def test_whatever_is_slow(kind: str) -> None:
    """On machines that take any other way round this collective; around a gather there is none."""
    slow = replace(WIRE, links={**WIRE.links, (kind, 0): [Link(1.0, 1e9)]})
    pairs = itertools.product([read_sharding(text, SQUARE, 2) for text in FEW], repeat=2)
    paths = [{step.kind for step in steps_between(*pair, (5, 3), 8, SQUARE, slow)} for pair in pairs]
    assert not any(kind in path for path in paths)
    assert wrong(FEW, SQUARE, (5, 3), machine=slow) == []


@pytest.mark.slow
def test_a_few_blocks_and_parts() -> None:
    assert wrong(["[R, R]", BLOCKS[5], BLOCKS[8], PARTS[4], PARTS[6]], SQUARE, (12, 4)) == []


@pytest.mark.sample(1)
@pytest.mark.sweep(2)
@pytest.mark.parametrize(("mesh", "shape"), [(SQUARE, (12, 6)), (SQUARE, (1, 7)), (WIDE, (5, 3))], ids=str)
def test_every_plain_change(mesh: Mesh, shape: tuple[int, ...]) -> None:
    """Even, uneven, and with ranks that hold nothing."""
    assert wrong([*PLAIN, *NESTED], mesh, shape, every=29) == []


@pytest.mark.sample(1)
@pytest.mark.sweep(3)
@pytest.mark.parametrize("mesh", [SQUARE, WIDE], ids=str)
@pytest.mark.parametrize("texts", [BLOCKS, PARTS], ids=["blocks", "parts"])
def test_every_change_of_blocks_and_parts(texts: list[str], mesh: Mesh) -> None:
    assert wrong(texts, mesh, (12, 4), every=19) == []


@pytest.mark.slow
def test_every_change_of_reductions() -> None:
    assert wrong(MIXED, SQUARE, (3, 2), every=19) == []


def test_three_axes() -> None:
    """All orders in which three axes may cut one dim, and others."""
    nested = ["", ", S(0), S(0, outside b)", ", S(0, outside a), S(0)", ", S(0, outside a), S(0, outside a)"]
    nested += [", S(0), S(0, outside a)", ", S(0, outside a), S(0, outside b)"]
    texts = [f"[S(0){rest or ', S(0), S(0)'}]" for rest in nested]
    texts += ["[R, R, R]", "[S(1), P(sum), S(0)]", "[P(sum), P(sum), R]", "[S(0), S(1), S(0)]"]
    assert wrong(texts, CUBE, (8, 8), every=19) == []


def test_a_sum_of_integers_is_held_by_the_first_ranks() -> None:
    """It has no equal shares; an average beside it has."""
    assert wrong(["[R, R]", "[P(sum), R]", "[P(sum), P(sum)]", "[P(sum), P(avg)]"], SQUARE, (3, 2), torch.int64) == []


def test_a_reduction_waits_for_one_that_does_not_commute() -> None:
    """What only the first rank holds, and a sum over another axis adds up, is no product any more."""
    assert wrong(["[P(sum), R]", "[R, P(product)]", "[P(max), R]"], SQUARE, (3, 2)) == []


def test_shards_that_are_uneven_on_the_way() -> None:
    """4 over 2 and then 3 ranks, between two even ends: the ranks' graphs differ."""
    source, target = (read_sharding(text, WIDE, 2) for text in ("[S(1), S(0, block 6)]", "[R, S(0)]"))
    value = torch.arange(48.0).reshape(12, 4)
    assert source.is_even(value.shape, WIDE)
    assert target.is_even(value.shape, WIDE)
    assert len(ranks_alike(program_of([(source, target)], WIDE, value))) > 1
    assert wrong_changes([(source, target)], WIDE, value) == []


def test_a_share_of_the_wrong_rank_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a slice at the neighbour's place."""
    right = lowering.put_on_line

    def moved(*args: object) -> object:
        line = right(*args)  # type: ignore[arg-type]
        return (
            line if line.kind != "slice" else type(line)(**{**vars(line), "here": line.mesh.world_size - 1 - line.here})
        )

    monkeypatch.setattr(lowering, "put_on_line", moved)
    assert wrong(["[R, R]", "[S(0), R]"], SQUARE, (4, 4)) == ["[R, R] -> [S(0), R]"]


def test_a_group_that_holds_nothing_of_what_is_cut() -> None:
    """The last ranks of `a` have none of the 12, and keep the 3 that all have; the others cut their 4 once more."""
    mesh = Mesh((("b", 2), ("a", 4)))
    once, twice = (
        Sharding((DimSharding(), DimSharding(parts=((12, DimSharding(levels)), (3, DimSharding())))))
        for levels in ((Level("a", 0, 4),), (Level("a", 0, 4), Level("b", 0, 2)))
    )
    assert wrong_changes([(once, twice), (Sharding.replicated(2), twice)], mesh, torch.randn(4, 15)) == []
