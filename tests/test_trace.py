"""`tpcompiler run --trace`: what ranks did, by the names and bytes of their files."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import tpcompiler
from tests.launch import ROOT, fork_ranks
from tests.runtime.commands import refused
from tests.test_costs import DIMS, exported, saved
from tpcompiler.ask.trace import merge_traces
from tpcompiler.runtime.artifact import read_manifest


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("trace") / "out", exported(4, 6, 5, DIMS), 2)


METADATA = {"process_name": "name", "process_sort_index": "sort_index", "thread_name": "name", "thread_sort_index": "sort_index"}  # fmt: skip


def faults_of(events: list[Any]) -> list[str]:
    """What Perfetto drops or does not know, of events that it takes at whole nanoseconds."""
    faults, tracks, arrows = list[str](), dict[Any, list[tuple[int, int, str]]](), Counter[Any]()
    for event in events:
        if event["ph"] == "M":
            known = event["name"] in METADATA and METADATA[event["name"]] in event["args"]
        else:
            track = event["pid"], event["tid"]
            known = all(type(part) is int and 0 <= part < 1 << 32 for part in track) and event["ts"] >= 0
        if event["ph"] == "X":
            begin, lasts = (round(event[key] * 1000) for key in ("ts", "dur"))
            known &= lasts >= 0
            tracks.setdefault(track, []).append((begin, -lasts, event["name"]))
        elif event["ph"] in ("s", "f"):
            arrows[event["id"], event["name"]] += 1 if event["ph"] == "s" else -1
        if not known or event["ph"] not in ("M", "X", "s", "f", "i"):
            faults.append(f"unknown: {event}")
    for track, spans in tracks.items():
        around: list[tuple[int, str]] = []  # ends
        for begin, lasts, name in sorted(spans):
            while around and around[-1][0] <= begin:
                around.pop()
            if around and begin - lasts > around[-1][0]:
                faults.append(f"{track}: {name} ends {begin - lasts - around[-1][0]} ns after {around[-1][1]}")
            around.append((begin - lasts, name))
    return faults + [f"arrow {key} without its other end" for key, left in arrows.items() if left]


def test_each_collective_is_there_once_with_its_bytes(out: Path, tmp_path: Path) -> None:
    """On every rank, at sizes that are not the example's, inside of its module's span."""
    inputs, file = tmp_path / "in.safetensors", tmp_path / "trace.json"
    save_file({"x": torch.ones(3, 9, 8), "other": torch.ones(2, 5, 8)}, inputs)
    ended = fork_ranks(2, ROOT / "tpcompiler/cli/__main__.py", "run", out, "--inputs", inputs, "--trace", file)
    assert ended.codes == (0, 0), ended.printed
    assert f"wrote {file}" in ended.printed[0]
    events: list[Any] = json.loads(file.read_text())["traceEvents"]
    assert faults_of(events) == []
    assert min(event["ts"] for event in events if "ts" in event) == 0
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["rank 0", "rank 1"]
    records = read_manifest(out).collectives
    costs = tpcompiler.open(out).cost({"batch": 3, "sequence": 9})
    for rank in range(2):
        own = [event for event in events if event["pid"] == rank and event["ph"] == "X"]
        sent = sorted((each for each in own if "node" in each["args"]), key=lambda each: float(each["ts"]))
        assert [each["args"]["node"] for each in sent] == [record.node for record in records]
        assert [each["name"] for each in sent] == [f"{row.kind} {row.module}" for row in records]
        assert sum(each["args"]["wire_bytes"] for each in sent) == costs.wire_bytes
        assert costs.wire_bytes != sum(record.wire_bytes for record in records)
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
    assert whole["baseTimeNanoseconds"] == 1_005_000
    assert faults_of(whole["traceEvents"]) == []
    assert [(e["ph"], e["name"], e["pid"], e.get("ts"), e.get("id")) for e in whole["traceEvents"]] == [
        ("M", "process_name", 0, None, None),
        ("M", "process_sort_index", 0, None, None),
        ("M", "process_name", 1, None, None),
        ("M", "process_sort_index", 1, None, None),
        ("X", "aten::add", 0, 0.0, None),
        ("s", "ac2g", 0, 1.0, 6),
        ("f", "ac2g", 0, 2.0, 6),
        ("X", "aten::add", 1, 500.0, None),
        ("s", "ac2g", 1, 501.0, 7),
        ("f", "ac2g", 1, 502.0, 7),
    ]


def test_spans_stay_inside_of_each_other_on_another_clock() -> None:
    """Two that end at the same nanosecond, on a host whose clock counts from elsewhere."""

    def span(begin: int, end: int) -> dict[str, Any]:
        return {"ph": "X", "name": "op", "pid": 7, "tid": 7, "ts": begin / 1000, "dur": (end - begin) / 1000}

    begin = 4_797_233_257_199_007
    spans = [span(at + inside, at + 900) for at in range(begin, begin + 1_000_000, 1009) for inside in (0, 333)]
    traces = [{"baseTimeNanoseconds": base, "traceEvents": spans} for base in (10**18, 10**18 + 1_234_567_890_123_457)]
    events = merge_traces(traces)["traceEvents"]
    assert faults_of(events) == []
    assert [round(event["dur"] * 1000) for event in events if event["ph"] == "X"] == [900, 567] * (len(spans))
    broken = [event | {"dur": event["dur"] + 0.001} if event.get("dur") == 0.567 else event for event in events]
    assert len(faults_of(broken)) == len(spans)


def test_a_package_shows_nothing(out: Path, tmp_path: Path) -> None:
    words = ("run", out, "--inputs", "none", "--trace", tmp_path / "trace.json")
    assert "a package is machine code, whose calls are not seen" in refused(*words, "--compiled")
    assert "is not a directory" in refused("run", out, "--inputs", "none", "--trace", tmp_path / "no" / "trace.json")
