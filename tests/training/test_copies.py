"""A program of fewer ranks than the world is trained in copies, which have one checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import export

import tpcompiler
from tests.launch import run_ranks
from tests.passes.stages import Call
from tests.training.ways import step

WORKER = Path(__file__).parent / "copies_worker.py"


def packed() -> Any:
    """Queries, keys and values in one matrix, whose shares DTensor cannot express."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).split([8, 4, 4], -1)
        return (self.out(q * torch.cat([k, v], -1)) - x).square().mean()

    torch.manual_seed(0)
    return Call(forward, qkv=nn.Linear(8, 16), out=nn.Linear(8, 8)).double()


def plain() -> Any:
    torch.manual_seed(0)
    layers = {"qkv": nn.Linear(8, 16), "out": nn.Linear(16, 8)}
    return Call(lambda self, x: (self.out(self.qkv(x).tanh()) - x).square().mean(), **layers).double()


@pytest.mark.parametrize(
    ("model", "world", "degree"),
    [(plain, 2, 1), *(pytest.param(*case, marks=pytest.mark.slow) for case in [(packed, 4, 2), (plain, 4, 2)])],
)
def test_copies_have_one_checkpoint_and_may_get_other_batches(
    model: Any, world: int, degree: int, tmp_path: Path
) -> None:
    batches = torch.randn(4, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    other = Call(lambda self, x: self.b(self.a(x)), a=nn.Linear(8, 8), b=nn.Linear(8, 8))
    programs = {
        "train": tpcompiler.export_training(model(), (batches[0],)),
        "other": export(other, (torch.randn(4, 8),)),
    }
    plan = {"qkv": "packed_colwise" if model is packed else "colwise", "out": "rowwise"} if degree > 1 else {}
    plan |= {"a": "colwise", "b": "rowwise"}
    tpcompiler.parallelize(programs, world, plan, degrees={"train": degree}).save(tmp_path / "out")
    torch.save(batches, tmp_path / "batches")
    run_ranks(world, WORKER, tmp_path, str(degree))
    got = [torch.load(tmp_path / str(rank)) for rank in range(world)]

    def losses(samples: torch.Tensor) -> list[float]:
        module = model()
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        return [step(module, optimizer, x) for x in samples]

    for rank, own in enumerate(got):
        torch.testing.assert_close(own["losses"], losses(batches)[2:], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(own["resumed"], losses(batches)[2:], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(own["apart"], losses(batches + rank // degree), rtol=1e-9, atol=1e-9)
        assert own["apart"] != own["losses"]
        assert "the share of 'qkv.weight' is SHA-256" in own["refused"]
        assert "give all copies of the program the same batches" in own["refused"]
