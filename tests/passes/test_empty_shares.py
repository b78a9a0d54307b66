"""Blocks, parts and units of which there are fewer than ranks: some ranks hold nothing, and all are right."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import export

import tpcompiler
from tests.passes.stages import Call
from tests.passes.test_shared_heads import SEPARATE, Attention
from tpcompiler.ir.dim_sharding import DimSharding, Level
from tpcompiler.ir.mesh import Mesh

X = torch.arange(32.0).view(4, 8).sin()


class Packed(nn.Module):
    """Three parts of `size` features each in one matrix."""

    def __init__(self, size: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.o = nn.Linear(8, 3 * size), nn.Linear(size, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.o(q * k.sigmoid() + v)


class Heads(nn.Module):
    """Three heads of two features, with queries, keys and values as the outermost dim of one matrix."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.o = nn.Linear(8, 18), nn.Linear(6, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 3, 2)).permute(2, 0, 3, 1, 4)
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.sample(1)
@pytest.mark.sweep
@pytest.mark.parametrize(
    ("size", "mesh", "held"),
    [
        (3, {"tp": 4}, [1, 1, 1, 0]),
        (5, {"tp": 4}, [2, 2, 1, 0]),
        (1, {"tp": 2}, [1, 0]),
        (1, {"a": 3, "b": 2}, [1, 0] * 3),
        (2, {"dp": 2, "tp": 4}, [1, 1, 0, 0] * 2),
    ],
    ids=str,
)
@pytest.mark.parametrize("style", ["packed_colwise", "colwise"])
def test_packed_blocks(size: int, mesh: dict[str, int], held: list[int], style: str, tmp_path: Path) -> None:
    program = tpcompiler.parallelize(export(Packed(size), (X,)), mesh, {"qkv": style, "o": "rowwise"})
    assert program.verify((X,)).ok
    ranks = [program.rank_program(rank).state_dict["qkv.weight"].shape[0] for rank in range(program.world_size)]
    assert ranks == [3 * own for own in held]
    assert [(c.kind, c.why) for c in program.collectives()] == [("all_reduce", "inherent")]
    program.save(tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("world", [4, 8])
def test_no_row_is_lost_between_two_axes(world: int) -> None:
    """On 8 ranks the axis is also tried as two, where a unit of the outer factor does not fit into a head."""
    x = torch.randn(2, 5, 8)
    program = tpcompiler.parallelize(export(Heads(), (x,)), world, {"qkv": "packed_colwise", "o": "rowwise"})
    assert program.verify((x,)).ok
    held = [program.rank_program(rank).state_dict["qkv.weight"].shape[0] for rank in range(world)]
    assert sum(held) >= 18


def test_a_unit_must_fit_into_every_piece() -> None:
    mesh = Mesh((("a", 2), ("b", 4)))
    lost = DimSharding((Level("a", 6, 2), Level("b", 0, 6)))
    assert lost.find_misfit(18, mesh) == "4 elements have no units of 6"
    kept = DimSharding((Level("a", 6, 2), Level("b", 0, 2)))
    assert kept.find_misfit(18, mesh) == ""
    assert sum(kept.local_size(18, mesh, mesh.coordinate(rank)) for rank in range(8)) == 18


PLACED = ["S(0)", "S(0, block 1)", "S(0, block 2)", "S(0, unit 3)", "S(0, parts 2 4)"]


@pytest.mark.slow
@pytest.mark.parametrize("outer", PLACED)
@pytest.mark.parametrize("inner", PLACED)
@pytest.mark.parametrize("mesh", [{"a": 3, "b": 2}, {"a": 2, "b": 3}], ids=str)
def test_blocks_inside_of_blocks_of_which_ranks_hold_none(outer: str, inner: str, mesh: dict[str, int]) -> None:
    """A whole value is cut for the output: ranks that run one graph must hold equally much on the way."""
    x: Any = torch.arange(6.0)
    exported = export(Call(lambda self, x: x.sin()), (x,))
    try:
        program = tpcompiler.parallelize(exported, mesh, {}, outputs=[{"a": outer, "b": inner}])
    except tpcompiler.ShardingError as error:  # a piece has no such blocks
        if not re.search("elements have no|the axes before it cut dim 0 otherwise", str(error)):
            raise
        return
    assert program.verify((x,)).ok


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_steps_are_dealt_as_the_axis_says_that_was_asked_for(packed: bool) -> None:
    """Two kv heads on four ranks run best as two axes, over which five steps would be dealt 2, 1, 1, 1."""
    x, plan = torch.randn(4, 5, 16), {"qkv": "colwise", "o": "rowwise"} if packed else SEPARATE
    exported = export(Attention(8, 2, packed), (x,))
    program = tpcompiler.parallelize(exported, 4, plan, inputs=["S(1)"], outputs=["S(1)"])
    assert program.verify((x,)).ok
    shapes = [program.rank_program(rank).graph.output_node().args[0][0].meta["val"].shape[1] for rank in range(4)]
    assert shapes == [2, 2, 1, 0]
    even = torch.randn(4, 8, 16)
    exported = export(Attention(8, 2, packed), (even,))
    program = tpcompiler.parallelize(exported, 4, plan, inputs=["S(1)"], outputs=["S(1)"])
    assert program.manifest().factors == {"tp": [2, 2]}  # where both say the same it may


@pytest.mark.slow
def test_an_op_on_nothing_follows_the_operand_that_it_is_said_to_take() -> None:
    """Two channels over three ranks: the last one makes an empty result without its operand, which it waits for."""
    x, rows = torch.randn(2, 2, 12, 5), {"tp": "S(2)"}
    exported = export(nn.Conv2d(2, 2, 1, 3), (x,))
    program = tpcompiler.parallelize(exported, {"tp": 3}, {}, inputs=[rows], outputs=[rows], machine="ideal")
    assert [each.kind for each in program.collectives()] == ["all_to_all"] * 2
    assert program.verify((x,)).ok
    assert program.check().findings == []
