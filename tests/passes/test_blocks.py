"""Cuts that lie inside of a merged dim, in blocks, taken through whole programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim, export

import tpcompiler
from tests.passes.stages import Call, cuts_are_kept
from tpcompiler.ir.node_placement import placement_of

X = torch.randn(4, 6, 5)


def made_of(
    forward: Callable[..., Any], world: int, *shapes: tuple[int, ...], dynamic: bool = False, **parts: Any
) -> tuple[tpcompiler.ParallelProgram, set[str]]:
    """The program whose first input is cut on its second dim, and what its values are."""
    args = tuple(torch.randn(shape) for shape in shapes or (X.shape,))
    module = Call(forward, **parts)
    names = forward.__code__.co_varnames[1 : 1 + len(args)]
    sizes = {name: {0: Dim.AUTO} for name in names} if dynamic else None
    exported, inputs = export(module, args, dynamic_shapes=sizes), ["S(1)"] + ["R"] * (len(args) - 1)
    with cuts_are_kept():
        program = tpcompiler.parallelize(exported, world, {}, inputs=inputs, outputs=["R"])
    report = program.verify(args)
    assert report.ok, str(report)
    graph = program.converted.resharded.graph
    return program, {s.text(program.mesh) for node in graph.nodes for s in placement_of(node).shardings}


def apart(x: torch.Tensor) -> torch.Tensor:
    """Merged, and taken apart where it was merged."""
    return (x.flatten(0, 1).sin() * 2).unflatten(0, (4, 6)) + 1


CASES: dict[str, tuple[Callable[..., Any], set[str]]] = {
    "split again": (lambda self, x: apart(x), {"S(0, block 6)", "S(1)"}),
    "split otherwise": (lambda self, x: x.flatten(0, 1).sin().unflatten(0, (2, 12)).cos(), {"S(1, block 6)"}),
    "merged further": (lambda self, x: x.flatten(0, 1).sin().flatten().cos(), {"S(0, block 30)"}),
    "a row of blocks beside others": (lambda self, x: torch.cat([x.flatten(0, 1)] * 2).cos(), {"S(0, block 6)"}),
    "rows that broadcast": (lambda self, x: x.flatten(0, 1).sin() + x[0, 0], {"S(0, block 6)"}),
    "summed up": (lambda self, x: x.flatten(0, 1).sin().sum(0), {"S(0, block 6)", "P(sum)"}),
    "repeated": (lambda self, x: x.flatten(0, 1).repeat(2, 1).cos(), {"S(0, block 6)"}),
    "bools and integers": (lambda self, x: (x.flatten(0, 1) > 0).long().unflatten(0, (4, 6)), {"S(0, block 6)"}),
    "a triangle": (lambda self, x: x.flatten(0, 1).tril(), set()),
    "positions": (lambda self, x: x.flatten(0, 1).cos()[torch.tensor([3, -1, 3, 23])], {"S(0)", "P(sum)"}),
    "a dim of one block": (lambda self, x: x[:1].flatten(0, 1).cos(), {"S(0)"}),
}


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize(("forward", "shardings"), CASES.values(), ids=CASES)
def test_equal_on_even_uneven_and_empty_shards(forward: Callable[..., Any], shardings: set[str], world: int) -> None:
    """Six over 2 is even, over 4 uneven, and over 8 some ranks hold nothing."""
    _, found = made_of(forward, world)
    if world == 2:
        assert shardings <= found


@pytest.mark.slow
def test_blocks_beside_a_cut_of_the_same_dim() -> None:
    """To turn one into the other takes a gather; before the dims are merged the same is an all_to_all."""
    program, found = made_of(lambda self, x: x.flatten(0, 1).sin(), 2)
    assert "S(0, block 6)" in found
    module = Call(lambda self, x: x.flatten(0, 1).sin())
    program = tpcompiler.parallelize(export(module, (X,)), 2, {}, inputs=["S(1)"], outputs=["S(0)"])
    assert [(c.kind, c.wire_bytes) for c in program.collectives()] == [("all_to_all", X.numel() * 4 // 4)]
    assert program.verify((X,)).ok


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_a_dynamic_number_of_blocks(world: int) -> None:
    program, found = made_of(lambda self, x: x.flatten(0, 1).sin().cos(), world, dynamic=True)
    assert "S(0, block 6)" in found
    for batch in (1, 2, 7):
        assert program.verify((torch.randn(batch, 6, 5),)).ok


def test_a_dynamic_number_of_uneven_blocks_is_gathered() -> None:
    """From an empty shard no rank could tell how many blocks there are."""
    program, found = made_of(lambda self, x: x.flatten(0, 1).sin(), 4, dynamic=True)
    assert not any("block" in text for text in found)
    assert [c.kind for c in program.collectives()] == ["all_gather"]
    for batch in (1, 3):
        assert program.verify((torch.randn(batch, 6, 5),)).ok


def test_blocks_of_a_dynamic_size_are_gathered() -> None:
    module = Call(lambda self, x: x.flatten(0, 1).sin())
    exported = export(module, (X,), dynamic_shapes={"x": {1: Dim.AUTO}})
    program = tpcompiler.parallelize(exported, 2, {}, inputs=["S(1)"], outputs=["R"])
    assert [c.kind for c in program.collectives()] == ["all_gather"]
    for steps in (6, 18):
        assert program.verify((torch.randn(4, steps, 5),)).ok


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_buffer_that_is_written_in_blocks(world: int) -> None:
    """A buffer follows what is put in it, also into blocks, and keeps it from call to call."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(x.flatten(0, 1))
        made: torch.Tensor = self.seen.unflatten(0, (4, 6)) * 2
        return made

    program, found = made_of(forward, world, seen=torch.zeros(24, 5))
    assert any("block 6" in text for text in found)
    assert program.verify((X,), then=[((X + 1,), {}), ((X * 3,), {})]).ok


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_a_weight_in_blocks(world: int) -> None:
    """Queries, keys and values in one weight: a cut of the heads lies inside of three blocks, offline."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = nn.functional.linear(x, self.weight).unflatten(-1, (3, 4, 2)).sin()
        return made

    program = tpcompiler.parallelize(
        export(Call(forward, weight=(24, 5)), (X,)), world, {}, inputs=["R"], outputs=["S(3)"]
    )
    assert program.verify((X,)).ok
