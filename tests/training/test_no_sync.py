"""Sums of gradients that are left out, and made later: gradients are those of the single device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tpcompiler
from tests.launch import run_ranks
from tests.passes.stages import Call
from tests.training.accumulating import run_all, take_turns
from tests.training.test_gradients import ROWS
from tests.training.test_ways import PLAN, batches, network
from tpcompiler.ir.shares import cut, row_sharding

PLANS: dict[str, Any] = {
    "dp": ({"dp": 2}, {}, [ROWS]),
    "tp": ({"tp": 2}, PLAN, None),
    "tp_unequal": ({"tp": [2, 1]}, PLAN, None),
    "dp_at_rest": ({"dp": 2}, {"**": "shard_at_rest(dp)"}, [ROWS]),
}


def parallelized(name: str) -> Any:
    mesh, plan, inputs = PLANS[name]
    program = tpcompiler.export_training(network(), (batches()[0],))
    return tpcompiler.parallelize(program, mesh, plan, inputs=inputs)


@pytest.mark.parametrize("names", [["dp"], pytest.param(["tp", "tp_unequal", "dp_at_rest"], marks=pytest.mark.slow)])
def test_gradients_are_those_of_one_device(names: list[str], tmp_path: Path) -> None:
    """Clipped, scaled, copied, given up, frozen, hooked and stepped between backwards in no_sync and others."""
    made = {name: parallelized(name) for name in names}
    for name, each in made.items():
        each.save(tmp_path / name)
    torch.save(batches(), tmp_path / "batches")
    run_ranks(2, Path(__file__).parent / "no_sync_worker.py", tmp_path, *made)
    whole = run_all(network(), batches())
    for name, each in made.items():
        rows = {row.name: row for row in each.manifest().tensors}
        for rank in range(2):
            for how, got in torch.load(tmp_path / f"{name}.{rank}").items():
                wanted = {
                    key: cut(value, row_sharding(rows[key.removesuffix(".grad")], each.mesh), each.mesh, rank)
                    for key, value in whole[how].items()
                }
                torch.testing.assert_close(
                    got, wanted, rtol=1e-12, atol=1e-14, msg=lambda text, at=(name, rank, how): f"{at}: {text}"
                )


@pytest.mark.slow
def test_programs_that_share_parameters(tmp_path: Path) -> None:
    one, x = network(), batches()
    programs = {"one": tpcompiler.export_training(one, (x[0],))}

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.down(torch.tanh(self.up(x))).abs().mean()
        return loss

    two = Call(forward, up=one.up, down=one.down)
    programs["two"] = tpcompiler.export_training(two, (x[0],))
    both = tpcompiler.parallelize(programs, {"dp": 2}, {}, inputs={name: [ROWS] for name in programs})
    both.save(tmp_path / "set")
    torch.save(x, tmp_path / "batches")
    run_ranks(2, Path(__file__).parent / "no_sync_worker.py", tmp_path, "set")
    wanted = take_turns(one, two, x)
    for rank in range(2):
        torch.testing.assert_close(torch.load(tmp_path / f"set.{rank}"), wanted, rtol=1e-12, atol=1e-14)
