"""The shares that suit unequal devices: by what each may hold, and by how fast each is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.export import ExportedProgram, export

import tpcompiler
from tests.machines import WIRE
from tests.runtime.commands import right
from tpcompiler.errors import ShardingError

MACHINE = "h100"
PAIRS, WIDE, HIDDEN = 9, 8192, 65536  # 38.7 GB of weights in float32
SLOW = "base: h100\nmemory: {memory}\nmemory_bandwidth: {bandwidth}\n"


def pairs() -> ExportedProgram:
    """Pairs of products, as in a transformer's MLP, without memory."""
    layers = [layer for _ in range(PAIRS) for layer in (nn.Linear(WIDE, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDE))]
    return export(nn.Sequential(*layers), (torch.empty(4, WIDE),))


@pytest.fixture(scope="module")
def large() -> ExportedProgram:
    with tpcompiler.weightless():
        return pairs()


def test_what_fits_only_in_unequal_shares(large: ExportedProgram) -> None:
    """Equal ones are 12.9 GB each, and 2:1:1 of them 19.3 and 9.7 GB."""
    found = tpcompiler.diagnose(large, devices=["24GB", "12GB", "12GB"], machine=WIRE)
    assert [*found.meshes] == ["tp=3", "tp=2:1:1"]
    assert not found.meshes["tp=3"].fits
    assert found.fastest == "tp=2:1:1"
    weights = [rank.weights for rank in found.meshes[found.fastest].costs]
    total = PAIRS * (2 * WIDE * HIDDEN + HIDDEN) * 4
    assert weights == [pytest.approx(total * share, rel=1e-3) for share in (1 / 2, 1 / 4, 1 / 4)]


def test_devices_that_are_large_enough_or_too_small(large: ExportedProgram) -> None:
    """Only a device that is as slow as it is small wants less of what fits."""
    assert tpcompiler.diagnose(large, devices=["40GB", "20GB", "20GB"]).fastest == "tp=3"
    with pytest.raises(ShardingError, match=r"no mesh that was tried fits: on tp=2:1:1, rank 0 would hold 19\.\d+ GB"):
        tpcompiler.diagnose(large, devices=["16GB", "8GB", "8GB"])


def test_the_slowest_rank_counts(large: ExportedProgram, tmp_path: Path) -> None:
    machines = []
    for name, bandwidth in (("fast", "3.0e+12"), ("slow", "1.5e+12")):
        machines.append(str(tmp_path / f"{name}.yaml"))
        Path(machines[-1]).write_text(SLOW.format(memory="8.0e+10", bandwidth=bandwidth))
    found = tpcompiler.diagnose(large, devices=[machines[0], machines[1], machines[1]])
    equal, best = found.meshes["tp=3"], found.meshes[found.fastest]
    assert best.mesh == {"tp": [2, 1, 1]}
    for name, each in found.meshes.items():
        assert found.seconds(name) == max(rank.seconds["model"].total for rank in each.costs)
    assert equal.seconds["model"].total > 1.2 * best.seconds["model"].total
    work = [rank.seconds["model"].work for rank in best.costs]
    assert work == [pytest.approx(work[0], rel=0.01)] * 3  # twice the bytes at twice the rate


def test_on_the_command_line(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    torch.export.save(export(layers, (torch.randn(2, 64),)), tmp_path / "model.pt2")
    asked = ("plan", tmp_path / "model.pt2", "--devices", "80kB,40kB,40kB", "--machine", WIRE)
    out = right(*asked)
    assert out.splitlines()[-2:] == [
        "the fastest: --tp 2:1:1, 690 ns for a call",
        "equal shares, --tp 3, do not fit: a rank holds at least 46.5 kB, and 40kB may hold 40 kB",
    ]
    data = json.loads(right(*asked, "--json"))
    assert data["fastest"] == "tp=2:1:1"
