"""Quantised weights that the graph itself makes numbers of: scales and zero points are cut with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import export

import tpcompiler
from tests.quantised.layers import Awq, BlockFp8, Gptq, Int4Packed, Int8Packed, Pair
from tpcompiler.errors import PlanError

X = torch.randn(4, 128, generator=torch.Generator().manual_seed(1))
PLAN = {"up": "colwise", "down": "rowwise"}


def placed(program: tpcompiler.ParallelProgram) -> dict[str, str]:
    return {row.name: row.sharding for row in program.manifest().tensors}


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("mesh", [2, 4, {"dp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("kind", [Gptq, Awq, BlockFp8, Int8Packed])
def test_a_pair_costs_one_all_reduce(kind: type[nn.Module], mesh: Any, tmp_path: Path) -> None:
    exported = export(Pair(kind), (X,))
    program = tpcompiler.parallelize(exported, mesh, PLAN)
    assert [(c.kind, c.payload_bytes) for c in program.collectives()] == [("all_reduce", 4 * 128 * 4)]
    assert program.verify((X,)).ok
    program.save(tmp_path / "out")  # and checks the files


WHOLE = {  # what the formats leave whole, and why
    Gptq: {"up.g_idx", "down.qzeros", "down.scales"},  # any row may be of any group
    Awq: set(),
    BlockFp8: set(),
    Int8Packed: {"down.scales"},  # of outputs, which a row-wise layer sums
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", WHOLE)
def test_scales_are_cut_with_their_weights(kind: type[nn.Module]) -> None:
    program = tpcompiler.parallelize(export(Pair(kind), (X,)), 2, PLAN)
    assert {name for name, sharding in placed(program).items() if sharding == "R"} == WHOLE[kind]


def test_what_stays_whole_is_said() -> None:
    program = tpcompiler.parallelize(export(Pair(Gptq), (X,)), 2, PLAN)
    assert [note.text for note in program.converted.notes if note.kind == "whole"] == [
        "down.qzeros: i32[8, 16], 512 B",
        "down.scales: f32[8, 128], 4.1 kB",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Gptq, Awq, BlockFp8])
def test_groups_that_do_not_divide(kind: type[nn.Module]) -> None:
    """160 rows are five groups of 32: ranks hold whole groups, three and two; of GPTQ's, any rows."""
    program = tpcompiler.parallelize(export(Pair(kind, inner=160), (X,)), 2, PLAN)
    assert [c.kind for c in program.collectives()] == ["all_reduce"]
    assert program.verify((X,)).ok
    whole = {name for name, sharding in placed(program).items() if sharding == "R"}
    assert whole == WHOLE[kind]


@pytest.mark.slow
def test_rows_that_are_packed_are_cut_together() -> None:
    exported = export(Pair(Int4Packed, inner=192), (X,))
    program = tpcompiler.parallelize(exported, 2, {"up": "colwise_gather_output"})
    assert program.verify((X,)).ok
    assert placed(program)["up.weight"] == "S(0, unit 64)"  # 128 rows and 64
    with pytest.raises(PlanError) as caught:
        tpcompiler.parallelize(exported, 2, PLAN)
    assert "needs what it sums over whole" in str(caught.value)
    assert "use 'colwise' or 'replicate'" in str(caught.value)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", WHOLE)
def test_the_search_cuts_them_too(kind: type[nn.Module]) -> None:
    """Of GPTQ's, output features alone: which group a row is of is known to the rank that holds all rows."""
    x = torch.randn(64, 1024)
    program = tpcompiler.parallelize(export(Pair(kind, 1024, 2048), (x,)), 2, "auto", optimize="memory")
    sent = ["all_gather"] * 2 if kind is Gptq else ["all_reduce"]
    assert [c.kind for c in program.collectives()] == sent
    whole, (rank, _) = program.parameter_bytes()
    assert rank < 0.55 * whole
    assert program.verify((x,)).ok
