"""Meshes of every size, and what is no mesh."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tpcompiler
from tests.bad_input.models import PLAN, Net, X, exported, refusal


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 20])
def test_a_mesh_of_any_size(world: int) -> None:
    """More ranks than there are features: the last ones hold nothing, and the sum is right."""
    made = tpcompiler.parallelize(exported(Net(), X), world, PLAN)
    assert made.verify((X,)).ok
    assert len(made.collectives()) == (world > 1)


def test_a_vocabulary_smaller_than_the_mesh() -> None:
    program = exported(nn.Sequential(nn.Embedding(17, 8)), torch.tensor([[3, 16]]))
    first, second, third = refusal(program, {"0": "embedding_rowwise"}, 32).splitlines()
    assert (first, second) == (
        "ShardingError: cannot shard '0.weight' on dim 0 of 17 by mesh axis 'tp' of 32 for aten.embedding.default: it "
        "needs shards that are not empty, and 17 over 32 leaves 15 empty",
        "  help: use a degree that divides 17, or change '0' from embedding_rowwise to colwise (248 B sent per rank "
        "and call)",
    )
    assert third.startswith('  asked by: the plan ("0": "embedding_rowwise")')
