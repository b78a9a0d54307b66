"""Every change of sharding on one axis, at the boundary of a real program: even, uneven, empty; static and dynamic."""

from __future__ import annotations

import itertools

import pytest
import torch

import tpcompiler
from tpcompiler.ir.program import mark_of

PLACEMENTS = ["R", "S(1)", "S(2)", "P(sum)"]


class Doubled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = torch.nn.Parameter(torch.randn(7, 3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, x + self.shift


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("world", [2, 4])
def test_every_pair(world: int, dynamic: bool) -> None:
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
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_change_from_and_to_blocks(world: int, dynamic: bool) -> None:
    """The second dim of [5, 6, 3] is cut: the rows of the first are blocks of the merged dim. 6 over 4 is uneven."""
    sizes = ({0: torch.export.Dim("batch")}, {0: 6 * torch.export.Dim("batch")}) if dynamic else None
    exported = torch.export.export(Merged(), (torch.randn(5, 6, 3), torch.randn(30, 3)), dynamic_shapes=sizes)
    for other, target in itertools.product(["R", "S(0)", "S(1)", "P(sum)"], repeat=2):
        program = tpcompiler.parallelize(exported, world, {}, inputs=["S(1)", other], outputs=[target])
        marks = [s.text(program.mesh) for node in program.resharded.graph.nodes for s in mark_of(node).shardings]
        for batch in ((2, 4) if world == 4 else (1, 3)) if dynamic else (5,):
            report = program.verify((torch.randn(batch, 6, 3), torch.randn(6 * batch, 3)))
            assert report.ok, f"S(1), {other} -> {target}: {report}"
        if not (dynamic and world == 4):
            assert any("block 6" in text for text in marks)


def test_what_each_pair_costs() -> None:
    """One collective at most, of the kind that moves the fewest bytes."""
    exported = torch.export.export(Doubled(), (torch.randn(5, 7, 3),))
    found = {}
    for source, target in itertools.product(PLACEMENTS, repeat=2):
        program = tpcompiler.parallelize(exported, 2, {}, inputs=[source], outputs=[target, source])
        found[source, target] = [c.kind for c in program.collectives() if c.node in _feeding_first(program)]
    reduce, gather, scatter, swap = ["all_reduce"], ["all_gather"], ["reduce_scatter"], ["all_to_all"]
    assert found == {
        **{("R", target): [] for target in PLACEMENTS},
        **{("S(1)", t): c for t, c in zip(PLACEMENTS, (gather, [], swap, gather), strict=True)},
        **{("S(2)", t): c for t, c in zip(PLACEMENTS, (gather, swap, [], gather), strict=True)},
        **{("P(sum)", t): c for t, c in zip(PLACEMENTS, (reduce, scatter, scatter, []), strict=True)},
    }


def _feeding_first(program: tpcompiler.ParallelProgram) -> set[str]:
    """The names of the nodes that the first output is computed from."""
    graph = program.local_program(0).graph
    stack, seen = [graph.output_node().args[0][0]], set()
    while stack:
        node = stack.pop()
        seen.add(node.name)
        stack.extend(node.all_input_nodes)
    return seen
