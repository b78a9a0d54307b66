"""The collectives that ranks call, beside those that their files say and those that torch counts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tpcompiler
from tests.launch import fork_ranks
from tests.runtime.commands import refused
from tests.test_costs import DIMS, exported, saved
from tpcompiler.report.measured import Call, compare_counts
from tpcompiler.runtime.artifact import read_manifest


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("measured") / "out", exported(4, 6, 5, DIMS), 2)


def test_other_calls_do_not_agree(out: Path) -> None:
    """One less, one more, and one of other bytes."""
    calls = [Call(row.kind, row.payload_bytes, "tp=2:tp") for row in read_manifest(out).collectives]
    inputs = {"x": torch.ones(4, 6, 8), "other": torch.ones(2, 5, 8)}
    assert all(row.agrees for row in compare_counts(tpcompiler.open(out).only, calls, inputs))
    for wrong in (calls[:-1], [*calls, calls[0]], [calls[0]._replace(payload_bytes=4), *calls[1:]]):
        assert [row.agrees for row in compare_counts(tpcompiler.open(out).only, wrong, inputs)].count(False) == 1
    assert not all(
        row.agrees for row in compare_counts(tpcompiler.open(out).only, calls, {**inputs, "x": torch.ones(2, 6, 8)})
    )


@pytest.mark.slow
def test_they_agree_where_it_runs(out: Path) -> None:
    """At sizes that are not the example's; torch counts the same calls."""
    ended = fork_ranks(2, Path(__file__).with_name("count_worker.py"), out, "3,9,8")
    assert ended.codes == (0, 0), ended.printed
    sent = 3 * 9 * 8 * 4
    assert ended.printed[0].strip().splitlines()[-1] == str(
        [
            ("mlp.layers.0", "all_reduce", 1, sent, True),
            ("mlp.layers.1", "all_reduce", 1, sent, True),
            ("mlp", "all_gather", 1, 3 * 9 * 4 * 4 // 2, True),
            ("mlp.head", "all_gather", 1, 2 * 5 * 4 * 4 // 2, True),
        ]
    )


def test_a_package_is_not_counted(out: Path) -> None:
    assert "a package is machine code, whose calls are not seen" in refused(
        "run", out, "--inputs", "none", "--count", "--compiled"
    )
