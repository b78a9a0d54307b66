"""Shardings in torch's placements, where these can express them."""

from __future__ import annotations

import pytest
from torch.distributed.tensor import Partial, Replicate, Shard

from tpcompiler.checkpoint.leaves import torch_placements
from tpcompiler.ir.dim_sharding import DimSharding
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.sharding import Sharding

ONE, TWO = Mesh.of(2), Mesh.of({"dp": 2, "tp": 2})
ROWS = Sharding((DimSharding.by("tp"), DimSharding()))


@pytest.mark.parametrize(
    ("sharding", "mesh", "wanted"),
    [
        (ROWS, ONE, (Shard(0),)),
        (Sharding.replicated(2), ONE, (Replicate(),)),
        (ROWS, TWO, (Replicate(), Shard(0))),
        (Sharding((DimSharding.by("tp", unit=4), DimSharding())), ONE, None),
        (Sharding((DimSharding.by("tp", block=4), DimSharding())), ONE, None),
        (Sharding(ROWS.dims, (("dp", "sum"),)), TWO, None),
    ],
)
def test_only_what_torch_can_express(sharding: Sharding, mesh: Mesh, wanted: object) -> None:
    assert torch_placements(sharding, (16, 8), mesh) == wanted


def test_a_pending_sum_is_torchs_too() -> None:
    """Negative control of the last case above: the placements alone would look right."""
    assert Sharding(ROWS.dims, (("dp", "sum"),)).placements(TWO) == (Partial("sum"), Shard(0))
