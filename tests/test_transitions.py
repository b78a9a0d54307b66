"""Every change of sharding at the boundary of a real program: even, uneven, empty; static and dynamic; real groups."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import tpcompiler
from tests.launch import called
from tests.long import some
from tests.sound import findings
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.node_placement import placement_of
from tpcompiler.ir.placements import PlacementSpec, parse_placement
from tpcompiler.ir.sharding import Sharding
from tpcompiler.ir.shares import cut, join

PLACEMENTS = ["R", "S(1)", "S(2)", "P(sum)"]


class Doubled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = torch.nn.Parameter(torch.randn(7, 3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, x + self.shift


@pytest.mark.slow
@pytest.mark.sweep(4)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("world", [2, 4, {"tp": [3, 1, 1]}], ids=str)
def test_every_pair(world: Any, dynamic: bool) -> None:
    """7 over 4 is uneven, 3 over 4 leaves one shard empty."""
    sizes = ({0: torch.export.Dim("batch")},) if dynamic else None
    exported = torch.export.export(Doubled(), (torch.randn(5, 7, 3),), dynamic_shapes=sizes)
    for source, target in itertools.product(PLACEMENTS, repeat=2):
        program = tpcompiler.parallelize(exported, world, {}, inputs=[source], outputs=[target, None])
        for batch in (1, 2, 5) if dynamic else (5,):
            report = program.verify((torch.randn(batch, 7, 3),))
            assert report.ok, f"{source} -> {target}: {report}"


class Merged(torch.nn.Module):
    def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        merged = x.flatten(0, 1)
        return (merged * 2 + z).sin() + merged


@pytest.mark.slow
@pytest.mark.sweep(5)
@pytest.mark.parametrize(
    ("world", "dynamic"),
    [*itertools.product([2, 3, 4], [False, True]), ({"tp": [2, 1, 1]}, False)],  # whose dynamic dims nothing cuts
    ids=str,
)
def test_every_change_from_and_to_blocks(world: Any, dynamic: bool) -> None:
    """The second dim of [5, 6, 3] is cut: the rows of the first are blocks of the merged dim. 6 over 4 is uneven."""
    sizes = ({0: torch.export.Dim("batch")}, {0: 6 * torch.export.Dim("batch")}) if dynamic else None
    exported = torch.export.export(Merged(), (torch.randn(5, 6, 3), torch.randn(30, 3)), dynamic_shapes=sizes)
    for other, target in some(itertools.product(["R", "S(0)", "S(1)", "P(sum)"], repeat=2), every=3):
        program = tpcompiler.parallelize(exported, world, {}, inputs=["S(1)", other], outputs=[target])
        marks = [
            s.text(program.mesh)
            for node in program.converted.resharded.graph.nodes
            for s in placement_of(node).shardings
        ]
        for batch in ((2, 4) if world == 4 else (1, 3)) if dynamic else (5,):
            report = program.verify((torch.randn(batch, 6, 3), torch.randn(6 * batch, 3)))
            assert report.ok, f"S(1), {other} -> {target}: {report}"
        if not (dynamic and world == 4) and isinstance(world, int):  # unequal shares may be gathered for less
            assert any("block 6" in text for text in marks)


SQUARE = Mesh((("dp", 2), ("tp", 2)))


def over(mesh: Mesh, text: str) -> PlacementSpec:
    """`R S(1)`: the placements over the axes of a mesh."""
    return dict(zip(mesh.names, map(parse_placement, text.split()), strict=True))


def on_both(text: str) -> PlacementSpec:
    return over(SQUARE, text)


@pytest.mark.slow
@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("S(0) P(sum)", "S(0) R"),
        ("S(0) P(sum)", "S(0) S(1)"),
        ("S(0) P(sum)", "R R"),
        ("P(sum) S(0)", "S(0) S(1)"),
        ("S(0) S(1)", "S(2) S(0)"),
        ("S(1) R", "S(0) P(sum)"),
        ("P(sum) P(sum)", "S(2) S(1)"),  # what pads the second has the dynamic size of what was scattered first
    ],
)
def test_a_dynamic_dim_on_two_axes(source: str, target: str) -> None:
    """Its size is a multiple of 2, not of 4: nothing on the way may cut it by both axes, though 8 of the example is."""
    sizes = ({0: torch.export.Dim("batch")},)
    exported = torch.export.export(Doubled(), (torch.randn(8, 7, 3),), dynamic_shapes=sizes)
    program = tpcompiler.parallelize(exported, SQUARE, {}, inputs=[on_both(source)], outputs=[on_both(target), None])
    assert findings(program) == []
    for batch in (2, 6, 8):
        assert program.verify((torch.randn(batch, 7, 3),)).ok


class Scores(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ x.transpose(1, 2)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(("source", "target"), [("S(0) S(2)", "S(1) S(2)"), ("S(2) S(0)", "S(2) S(1)")])
def test_two_dims_of_one_dynamic_size(source: str, target: str) -> None:
    """Of s * s elements torch's fake tensors make s and (s**2)//s, which are equal in every run."""
    exported = torch.export.export(Scores(), (torch.randn(4, 6, 4),), dynamic_shapes=({1: torch.export.Dim.AUTO},))
    program = tpcompiler.parallelize(exported, SQUARE, {}, inputs=[on_both(source)], outputs=[on_both(target)])
    assert findings(program) == []
    for size in (2, 6, 8):
        assert program.verify((torch.randn(4, size, 4),)).ok


CHANGES = [  # over the axes of SQUARE
    ("S(0) R", "R R"),  # all_gather over dp
    ("R S(1)", "R R"),  # over tp, uneven
    ("S(0) S(0)", "R R"),  # over both as one group
    ("P(sum) R", "R R"),  # all_reduce
    ("R P(max)", "R R"),
    ("P(sum) P(sum)", "R R"),
    ("P(sum) R", "S(1) R"),  # reduce_scatter
    ("P(sum) P(sum)", "S(0) S(0)"),
    ("R P(sum)", "R S(1)"),  # uneven
    ("R S(0)", "R S(2)"),  # all_to_all
    ("R S(1)", "R S(2)"),  # uneven
    ("S(0) S(0)", "S(1) S(1)"),
    ("S(0) S(1)", "S(1) S(0)"),  # several steps
    ("R R", "S(0) S(1)"),  # slices
    ("R R", "P(sum) R"),  # held
    ("R R", "R P(product)"),
]


ALONG = [  # over one axis, whose ranks have unequal shares
    ("S(0)", "R"),
    ("S(2)", "R"),
    ("P(sum)", "R"),
    ("P(min)", "R"),
    ("P(sum)", "S(1)"),
    ("S(0)", "S(2)"),
    ("R", "S(1)"),
]
KINDS = {"all_gather", "all_reduce", "reduce_scatter", "all_to_all"}
SQUARE_GROUPS = {
    "dp=2,tp=2:dp": [[0, 2], [1, 3]],
    "dp=2,tp=2:tp": [[0, 1], [2, 3]],
    "dp=2,tp=2:dp.tp": [[0, 1, 2, 3]],
}


class Same(torch.nn.Module):
    def forward(self, xs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return tuple(x * 2 for x in xs)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("mesh", "changes", "groups"),
    [
        (SQUARE, CHANGES, SQUARE_GROUPS),
        (Mesh.of({"tp": [2, 1]}), ALONG, {"tp=2:tp": [[0, 1]]}),
        (Mesh.of({"tp": [2, 1, 1]}), ALONG, {"tp=3:tp": [[0, 1, 2]]}),
    ],
    ids=["2 x 2", "2 and 1", "2, 1 and 1"],
)
def test_every_kind_over_real_groups(
    mesh: Mesh, changes: list[tuple[str, str]], groups: dict[str, list[list[int]]], tmp_path: Path
) -> None:
    """From files on gloo: every collective over every kind of group, even and uneven; the ranks' parts make the whole."""
    value = torch.arange(4.0 * 5 * 6).reshape(4, 5, 6) - 20
    values = [value + i for i in range(len(changes))]
    inputs, outputs = ([over(mesh, pair[end]) for pair in changes] for end in (0, 1))
    program = tpcompiler.parallelize(torch.export.export(Same(), (values,)), mesh, {}, inputs=inputs, outputs=outputs)
    program.save(tmp_path / "out")
    assert {c.kind for c in program.collectives()} == KINDS
    assert program.manifest().groups == groups
    for rank in range(mesh.world_size):
        graph = program.rank_program(rank).graph
        assert {arg for n in graph.nodes for arg in n.args if ":" in str(arg)} == set(groups)

    froms, tos = ([Sharding.of(spec, mesh, 3, "a test") for spec in specs] for specs in (inputs, outputs))
    calls = [[([cut(v, s, mesh, r) for v, s in zip(values, froms, strict=True)],)] for r in range(mesh.world_size)]
    got = [results[0] for results in called(calls, tmp_path)]
    for at, (v, to) in enumerate(zip(values, tos, strict=True)):
        for whole in join([own[at] for own in got], to, mesh, v.shape):
            assert torch.equal(whole, v * 2), changes[at]
