"""`tpcompiler run --trace`: what ranks did, by the names and bytes of their files."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.launch import ROOT, fork_ranks
from tests.runtime.commands import refused
from tests.test_costs import DIMS, exported, saved
from tpcompiler.explain.costs import cost_artifact
from tpcompiler.explain.trace import merge_traces
from tpcompiler.runtime.artifact import read_manifest


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("trace") / "out", exported(4, 6, 5, DIMS), 2)


@pytest.mark.slow
def test_each_collective_is_there_once_with_its_bytes(out: Path, tmp_path: Path) -> None:
    """On every rank, at sizes that are not the example's, inside of its module's span."""
    inputs, file = tmp_path / "in.safetensors", tmp_path / "trace.json"
    save_file({"x": torch.ones(3, 9, 8), "other": torch.ones(2, 5, 8)}, inputs)
    ended = fork_ranks(2, ROOT / "tpcompiler/cli/__main__.py", "run", out, "--inputs", inputs, "--trace", file)
    assert ended.codes == (0, 0), ended.printed
    assert f"wrote {file}" in ended.printed[0]
    events: list[Any] = json.loads(file.read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["rank 0", "rank 1"]
    records = read_manifest(out).collectives
    costs = cost_artifact(out, {"batch": 3, "sequence": 9})
    for rank in range(2):
        own = [event for event in events if event["pid"] == rank and event["ph"] == "X"]
        sent = sorted((each for each in own if "node" in each["args"]), key=lambda each: float(each["ts"]))
        assert [each["args"]["node"] for each in sent] == [record["node"] for record in records]
        assert [each["name"] for each in sent] == [f"{row['kind']} {row['module']}" for row in records]
        assert sum(each["args"]["wire_bytes"] for each in sent) == costs.wire_bytes
        assert costs.wire_bytes != sum(record["wire_bytes"] for record in records)
        assert Counter(each["args"]["kind"] for each in sent) == {
            kind: sum(1 for each in own if each["name"] == f"gloo:{kind}") for kind in ("all_reduce", "all_gather")
        }
        for each in sent:
            assert each["args"]["axis"] == "tp"
            ends = each["ts"], each["ts"] + each["dur"]
            spans = [(s["ts"], s["ts"] + s["dur"]) for s in own if s["name"] == each["args"]["module"]]
            assert [span[0] <= ends[0] and ends[1] <= span[1] for span in spans].count(True) == 1


def test_ranks_stand_side_by_side() -> None:
    """In processes of their own, on one clock, each arrow with its own end."""
    first = {
        "baseTimeNanoseconds": 1_000_000,
        "traceEvents": [
            {"ph": "M", "name": "process_name", "pid": 71, "tid": 0, "ts": 1.0, "args": {"name": "python"}},
            {"ph": "X", "name": "aten::add", "pid": 71, "tid": 71, "ts": 5.0, "dur": 2.0},
            {"ph": "s", "name": "ac2g", "pid": 71, "tid": 71, "ts": 6.0, "id": 3},
            {"ph": "f", "name": "ac2g", "pid": 0, "tid": 7, "ts": 7.0, "id": 3},
            {"ph": "X", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": "x", "ts": 0.0, "dur": 9.0},
        ],
    }
    whole = merge_traces([first, {**first, "baseTimeNanoseconds": 1_500_000}])
    assert whole["baseTimeNanoseconds"] == 1_000_000
    assert [(e["ph"], e["name"], e["pid"], e.get("ts"), e.get("id")) for e in whole["traceEvents"]] == [
        ("M", "process_name", 0, None, None),
        ("M", "process_sort_index", 0, None, None),
        ("X", "aten::add", 0, 5.0, None),
        ("s", "ac2g", 0, 6.0, 6),
        ("f", "ac2g", 0, 7.0, 6),
        ("M", "process_name", 1, None, None),
        ("M", "process_sort_index", 1, None, None),
        ("X", "aten::add", 1, 505.0, None),
        ("s", "ac2g", 1, 506.0, 7),
        ("f", "ac2g", 1, 507.0, 7),
    ]


def test_a_package_shows_nothing(out: Path, tmp_path: Path) -> None:
    words = ("run", out, "--inputs", "none", "--trace", tmp_path / "trace.json")
    assert "a package is machine code, whose calls are not seen" in refused(*words, "--compiled")
    assert "is no directory" in refused("run", out, "--inputs", "none", "--trace", tmp_path / "no" / "trace.json")
