"""At which sizes changes are run."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.utils._sympy.value_ranges import ValueRanges

import tpcompiler
from tests.passes.stages import Call
from tests.trust import collectives
from tests.trust.damage import Artifact, damaged
from tests.zoo.case import randomise
from tpcompiler.ir import edit
from tpcompiler.ir.shares import mesh_of
from tpcompiler.judge.sound.changes import change_shape
from tpcompiler.judge.sound.check import check_programs
from tpcompiler.judge.sound.drawn import LEAST, MULTIPLE, DrawnSizes
from tpcompiler.judge.sound.folded import folded


@pytest.mark.slow
@pytest.mark.parametrize(
    ("placement", "shape"), [("R", [16, 16, 16]), ("S(0)", [100, 16, 16]), ("S(2)", [100, 16, 60])]
)
def test_a_change_is_small_where_nothing_happens(placement: str, shape: list[int]) -> None:
    """Pending sums of a matrix that fits no machine: reduced, scattered, and scattered by way of the first dim."""
    example = (torch.zeros(1).expand(100, 2**40, 4),)
    exported = torch.export.export(nn.Sequential(nn.Linear(4, 60)), example)
    artifact = Artifact.of(tpcompiler.parallelize(exported, 2, {"0": "rowwise"}, outputs=[placement]))
    report = check_programs(artifact.written(), artifact.manifest)
    assert (report.ok, report.findings) == (True, [])
    made = folded(artifact.ranks[0], artifact.manifest, mesh_of(artifact.manifest), {})
    region = next(each for each in made.regions.values() if any(map(edit.is_collective, each.nodes)))
    assert change_shape(made, region.nodes, region) == shape


assert collectives  # it registers its kinds


def test_many_numbers_are_short() -> None:
    """A change of more than four million elements is run on two bytes for each, and a wrong one is found all the same."""
    exported = torch.export.export(nn.Sequential(nn.Linear(4, 4096)), (torch.zeros(1100, 4),))
    for style, damage in (("colwise_gather_output", "gathered along the first dim"), ("rowwise", "reduced by avg")):
        sound = Artifact.of(tpcompiler.parallelize(exported, 2, {"0": style}))
        wrong = damaged(damage, sound)
        assert wrong is not None
        said = [check_programs(each.written(), each.manifest).findings for each in (sound, wrong)]
        assert [len(findings) for findings in said] == [0, 1]
        assert "does not become R of the whole in its region" in said[1][0]


@pytest.mark.sample(1)
@pytest.mark.parametrize("long", [12, 6])
def test_sizes_of_which_one_may_not_exceed_another(long: int) -> None:
    """A slice from the length of another input on: most draws have none. A wrong change of it is found all the same."""
    module = Call(lambda self, x, y: (self.linear(x)[y.shape[0] :], y + 1), linear=nn.Linear(8, 8))
    example = (torch.randn(long, 8), torch.randn(4, 3))
    exported = torch.export.export(randomise(module), example, dynamic_shapes=({0: Dim.AUTO}, {0: Dim.AUTO}))
    torch.export.save(exported, file := io.BytesIO())
    exported = torch.export.load(file)  # which notes the example's difference of both too
    program = tpcompiler.parallelize(exported, 4, {"linear": "rowwise"}, inputs={"y": "S(0)"})
    assert program.verify([torch.randn(31, 8), torch.randn(8, 3)]).ok
    sound = Artifact.of(program)
    wrong = damaged("reduced by avg", sound)
    assert wrong is not None
    said = [check_programs(each.written(), each.manifest).findings for each in (sound, sound, sound, wrong)]
    assert [bool(findings) for findings in said] == [False, False, False, True]
    assert "does not become" in said[3][0]


def test_scaled_sizes_keep_the_proportions_of_the_example() -> None:
    found = set()
    for _ in range(50):
        sizes = DrawnSizes(scaled=True)
        few, many = sizes.of("s0", None, 4), sizes.of("s1", ValueRanges(2, 4096), 12)
        assert (many, few % 4) == (3 * few, 0)
        assert few >= LEAST
        found.add(few)
    assert len(found) > 1
    assert DrawnSizes(scaled=True).of("s0", ValueRanges(2, 16), 4) == 4
    assert DrawnSizes(scaled=True).of("u0", None) >= LEAST


@pytest.mark.parametrize("fits", [False, True])
def test_sizes_are_drawn_in_their_range(fits: bool) -> None:
    """Those that fit are multiples of many numbers; others need not be."""
    known = ValueRanges(3, 400)
    found = {DrawnSizes(fits=fits).of("s0", known) for _ in range(200)}
    assert len(found) > 1
    assert all(3 <= size <= 400 for size in found)
    assert all(size % MULTIPLE == 0 for size in found) == fits
    assert DrawnSizes({"s0": 24}, fits=True).of("s0", ValueRanges(24, 25)) == 25
    assert DrawnSizes().of("s1", None) >= 0
