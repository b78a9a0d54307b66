"""The promise about random numbers: ranks that are seeded alike draw what the single device draws with that seed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tpcompiler
from tests.launch import run_ranks
from tests.promises.models import MLP
from tpcompiler.judge.compare.simulate import random_state, set_random_state, simulate

SEED = 5
X = torch.ones(3, 4)


class Drawing(nn.Module):
    """Dropout of a value that is cut, and noise on one that is whole."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kept = F.dropout(self.up(x), 0.5, True)
        return self.down(kept) + torch.rand(4), (kept != 0).int()


def converted() -> tpcompiler.ParallelProgram:
    torch.manual_seed(0)
    return tpcompiler.parallelize(torch.export.export(Drawing(), (X,)), 2, MLP)


def single(made: tpcompiler.ParallelProgram, seed: int) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    return list(made.only.original().module()(X))


def agree(got: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    """The masks bit for bit, the sums within rounding."""
    return torch.allclose(got[0], want[0], rtol=1e-5, atol=1e-6) and torch.equal(got[1], want[1])


def test_ranks_that_are_seeded_alike_draw_what_the_single_device_draws() -> None:
    made = converted()
    for seed in (SEED, 6):
        want = single(made, seed)
        torch.manual_seed(seed)
        ranks = simulate([made.rank_program(rank) for rank in range(2)], [[X]] * 2)
        assert all(agree(rank.outputs, want) for rank in ranks)
    assert not agree(single(made, SEED), single(made, 6))  # negative control


@pytest.mark.slow
def test_ranks_that_are_seeded_otherwise_give_wrong_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each draws a mask of its own, of which it holds a part: the sum over the ranks mixes them, and nothing is said."""
    made = converted()
    torch.manual_seed(6)
    other, seeds = random_state(), iter([SEED])

    def seeded_otherwise(state: tuple[torch.Tensor, torch.Tensor | None]) -> None:
        set_random_state(state if next(seeds, None) is not None else other)

    monkeypatch.setattr("tpcompiler.judge.compare.simulate.set_random_state", seeded_otherwise)
    want = single(made, SEED)
    torch.manual_seed(SEED)
    first, second = simulate([made.rank_program(rank) for rank in range(2)], [[X]] * 2)
    assert not agree(first.outputs, want)
    assert not agree(second.outputs, want)


@pytest.mark.slow
def test_real_processes_draw_what_the_single_device_draws(tmp_path: Path) -> None:
    made = converted()
    made.save(tmp_path / "out")
    run_ranks(2, Path(__file__).parent / "random_worker.py", tmp_path / "out", str(SEED), tmp_path)
    want = single(made, SEED)
    alike, otherwise = (
        [torch.load(tmp_path / f"{how}.{rank}.out") for rank in range(2)] for how in ("alike", "otherwise")
    )
    assert all(agree(rank, want) for rank in alike)
    assert not any(agree(rank, want) for rank in otherwise)
    assert not torch.equal(otherwise[0][0], otherwise[1][0])
