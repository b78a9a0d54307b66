"""Meshes of every size, and what is no mesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tpcompiler
from tests.bad_input.models import PLAN, Net, X, exported, refusal


@pytest.mark.parametrize("world", [1, 20])
def test_a_mesh_of_any_size(world: int) -> None:
    """More ranks than there are features: the last ones hold nothing, and the sum is right."""
    made = tpcompiler.parallelize(exported(Net(), X), world, PLAN)
    assert made.verify((X,)).ok
    assert len(made.collectives()) == (world > 1)


DEGREE = "a degree is an integer of at least 1"


@pytest.mark.parametrize(
    ("mesh", "expected"),
    [
        (0, f"MeshError: mesh axis 'tp' has degree 0\n  help: {DEGREE}"),
        (-1, f"MeshError: mesh axis 'tp' has degree -1\n  help: {DEGREE}"),
        (True, f"MeshError: mesh axis 'tp' has degree True\n  help: {DEGREE}"),
        (2.0, f"MeshError: mesh axis 'tp' has degree 2.0\n  help: {DEGREE}"),
        (None, f"MeshError: mesh axis 'tp' has degree None\n  help: {DEGREE}"),
        ("2", f"MeshError: mesh axis 'tp' has degree '2'\n  help: {DEGREE}"),
        (
            4096 * 4096,
            "MeshError: mesh tp=16777216 has 16777216 ranks\n"
            "  help: one program is made per rank: use at most 65536 ranks",
        ),
        ({"a b": 2}, "MeshError: mesh axis 'a b' is not a name\n  help: use a name such as \"tp\""),
    ],
)
def test_no_mesh(mesh: Any, expected: str) -> None:
    assert refusal(exported(Net(), X), PLAN, mesh) == expected


def test_an_axis_that_the_mesh_does_not_have() -> None:
    assert refusal(exported(Net(), X), {"up.weight": {"dp": "S(0)"}}) == (
        "ShardingError: 'up.weight' names mesh axis 'dp', which the mesh (tp=2) does not have\n"
        "  help: use one of tp\n"
        "  asked by: the plan (\"up.weight\": {'dp': 'S(0)'})"
    )


def test_a_vocabulary_smaller_than_the_mesh() -> None:
    program = exported(nn.Sequential(nn.Embedding(17, 8)), torch.tensor([[3, 16]]))
    first, second, third = refusal(program, {"0": "embedding_rowwise"}, 32).splitlines()
    assert (first, second) == (
        "ShardingError: cannot shard '0.weight' on dim 0 of 17 by mesh axis 'tp' of 32 for aten.embedding.default: it "
        "needs shards that are not empty, and 17 over 32 leaves 15 empty",
        "  help: use a degree that divides 17, or change '0' from embedding_rowwise to replicate (0 wire bytes per rank and "
        "call), or pin '0.weight' to R (0 wire bytes per rank and call)",
    )
    assert third.startswith('  asked by: the plan ("0": "embedding_rowwise")')
