"""What `doctor` says of each degree is what a conversion for it has."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.export import ExportedProgram, export

import tpcompiler
from tests.runtime.commands import right
from tests.zoo.index import CASES
from tpcompiler.cost.machine import Machine
from tpcompiler.errors import ShardingError


class Mlp(nn.Module):
    def __init__(self, wide: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, wide, bias=False), nn.Linear(wide, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


@cache
def mlp(wide: int = 192) -> ExportedProgram:
    torch.manual_seed(0)
    return export(Mlp(wide), (torch.randn(2, 8, 64),))


def held(made: tpcompiler.ParallelProgram) -> int:
    said = next(note.text for note in made.notes if note.text.startswith("a rank holds about "))
    return int(said.split()[4].replace(",", ""))


def test_degrees_are_powers_of_two_and_those_that_divide_what_is_cut() -> None:
    found = tpcompiler.diagnose(mlp())
    assert [each.ranks for each in found.degrees] == [1, 2, 3, 4, 6, 8, 12, 16]
    assert not any(each.remarks for each in found.degrees)


def test_each_degree_is_what_its_conversion_has() -> None:
    for each in tpcompiler.diagnose(mlp()).degrees:
        made = tpcompiler.parallelize(mlp(), each.ranks, "auto")
        assert each.collectives == len(made.collectives())
        assert each.wire_bytes == sum(c.wire_bytes for c in made.collectives())
        assert each.memory.total == held(made)
        assert each.memory.weights == max(made.parameter_bytes()[1])


def test_a_step_by_hand() -> None:
    """The rooflines of docs/auto.md, with 192 features between: of two ranks, each reads and writes half of them."""
    machine, two = Machine.read(), tpcompiler.diagnose(mlp()).degrees[1]
    moved = 2 * (16 * 64 + 96 * 64 + 16 * 96) * 4
    assert two.seconds.compute == pytest.approx(moved / machine.memory_bandwidth)
    assert two.seconds.network == pytest.approx(16 * 64 * 4 / machine.plain_link.bandwidth)


def test_the_smallest_degree_within_a_limit() -> None:
    """As the conversions themselves say."""
    limit = held(tpcompiler.parallelize(mlp(), 3, "auto"))
    found = tpcompiler.diagnose(mlp(), memory=limit)
    assert found.least == 3
    assert [each.ranks for each in found.degrees if not each.fits] == [1, 2]
    for ranks in (1, 2):
        with pytest.raises(ShardingError, match="more than the limit"):
            tpcompiler.parallelize(mlp(), ranks, "auto", memory=limit)


def test_no_degree_is_enough() -> None:
    limit = held(tpcompiler.parallelize(mlp(512), 32, "auto"))
    with pytest.raises(ShardingError, match=r"(?s)no degree up to 16 fits: one of 16 ranks .*help: use 32 ranks, or a"):
        tpcompiler.diagnose(mlp(512), memory=limit)


def test_an_uneven_cut_is_named() -> None:
    eight = next(each for each in tpcompiler.diagnose(mlp(100)).degrees if each.ranks == 8)
    assert "up.weight: the largest share is 1.04 times an even one" in eight.remarks


@pytest.mark.slow
def test_heads_that_ranks_share_are_named() -> None:
    """Four heads of keys for eight ranks: eight rows of 64 features each would be enough, and sixteen are held."""
    found = tpcompiler.diagnose(CASES["llama"].export(False))
    (eight,) = (each for each in found.degrees if each.ranks == 8)
    assert eight.mesh == {"tp_0": 4, "tp_1": 2}
    assert eight.remarks == tuple(
        f"model.layers.*.self_attn.{name}.weight: 4 shares, each on 2 ranks, 2,048 bytes more of each rank"
        for name in ("k_proj", "v_proj")
    )


def test_the_command(tmp_path: Path) -> None:
    torch.export.save(mlp(100), tmp_path / "model.pt2")
    text = right("doctor", tmp_path / "model.pt2")
    assert max(map(len, text.splitlines()[1:])) <= 80
    assert text.endswith("the smallest that fits: --tp 1\n")
    assert "8: up.weight: the largest share is 1.04 times an even one\n" in text
    data = json.loads(right("doctor", tmp_path / "model.pt2", "--memory", "0.04MB", "--json"))
    assert data["limit"] == 40_000
    assert data["least"] == next(each["ranks"] for each in data["degrees"] if each["bytes"]["total"] <= 40_000)
