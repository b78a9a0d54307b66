"""Weights as DTensors and back, in real processes, and shardings in torch's placements."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

import tpcompiler
from tests.checkpoint.models import exported
from tests.launch import run_ranks
from tpcompiler.checkpoint.leaves import torch_placements
from tpcompiler.ir.dim_sharding import DimSharding
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.sharding import Sharding

WORKER = Path(__file__).parent / "dtensor_worker.py"
LAYER = {"table": "embedding_rowwise", "layers.0.up": "colwise", "layers.0.down": "rowwise"}
PARTS = {**LAYER, "layers.1.up.weight": "S(0, parts 4 8)", "layers.1.down.weight": "S(1, parts 4 8)"}


@pytest.mark.slow
def test_there_through_a_checkpoint_and_back(tmp_path: Path) -> None:
    """Cut evenly, pending, and in parts, which DTensor cannot say; tied once."""
    tpcompiler.parallelize(exported(2), 2, PARTS).save(tmp_path / "out", layout="shared")
    run_ranks(2, WORKER, tmp_path)
    want = {name: value.detach().clone() for name, value in exported(2).state_dict.items()}
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.result")
        assert found["wholes"].keys() == want.keys()
        assert all(torch.equal(found["wholes"][name], want[name]) for name in want)
        (said,) = found["said"]
        assert "layers.1.up.weight" in said
    for name, value in want.items():
        if name != "layers.0.up.weight":
            value += 1
    tpcompiler.open(tmp_path / "out").merge(tmp_path / "back.pt2")
    back = torch.export.load(tmp_path / "back.pt2")
    assert all(torch.equal(back.state_dict[name], want[name]) for name in want)
    assert tpcompiler.open(tmp_path / "out").check().ok


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
