"""Sound artifacts of every kind pass, as files; and what the files share is read once."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

import tpcompiler
from tests.checkpoint.models import PLAN, exported
from tests.devices import exported as on_devices
from tests.passes.test_shared_heads import converted as few_heads
from tests.runtime.poisons import entries_of
from tests.trust.subjects import subject
from tpcompiler.judge.sound.check import CheckReport, check_programs
from tpcompiler.judge.sound.written import read_ranks
from tpcompiler.runtime.artifact import rank_file, sha256


def check(program: tpcompiler.ParallelProgram, directory: Path) -> CheckReport:
    program.save(directory)
    return tpcompiler.open(directory).check(program.only.original())


@pytest.mark.slow
@pytest.mark.sweep(4)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_ranks_without_heads(packed: bool, dynamic: bool, tmp_path: Path) -> None:
    """Three kv heads on four ranks: one has empty shares, and does without attention."""
    report = check(few_heads(6, 3, 4, packed, dynamic), tmp_path / "out")
    assert (report.ok, report.findings) == (True, [])


def test_a_program_in_memory_without_weights() -> None:
    with tpcompiler.weightless():
        layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        exported = torch.export.export(layers, (torch.ones(2, 4),))
    report = tpcompiler.parallelize(exported, 2, {"0": "colwise", "2": "rowwise"}).check()
    assert (report.ok, report.findings) == (True, [])


def test_the_original_has_the_same_tensors() -> None:
    """By name: one that no rank holds, or that the original lacks, is not of this model."""
    example = (torch.randn(2, 4),)
    model, more = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)), nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    more.load_state_dict(model.state_dict())
    more.register_buffer("count", torch.zeros(()))
    one, two = torch.export.export(model, example), torch.export.export(more, example)
    for converted, original, finding in (
        (one, one, []),
        (two, two, []),
        (one, two, ["no rank holds the original's tensor 'count'"]),
        (two, one, ["the original has no tensor 'count': it is another model"]),
    ):
        made = tpcompiler.parallelize(converted, 2, {"0": "colwise", "1": "rowwise"})
        ranks = read_ranks(made.only)
        assert check_programs(ranks, made.manifest(), original).findings == finding


def test_for_cuda(tmp_path: Path) -> None:
    """Checked where there is no GPU: the ops are evaluated as if for a CPU."""
    program, plan, _ = on_devices("literals")
    report = check(tpcompiler.parallelize(program, 2, plan, device_type="cuda"), tmp_path / "out")
    assert (report.ok, report.findings) == (True, [])


@pytest.mark.slow
def test_a_program_set(tmp_path: Path) -> None:
    """Weights lie in the first program's files; the others' manifests must say of them what its own says."""
    tpcompiler.parallelize({"prefill": exported(), "decode": exported()}, 2, PLAN).save(tmp_path / "out")
    assert tpcompiler.open(tmp_path / "out").check().ok
    path = tmp_path / "out" / "decode" / "manifest.json"
    data = json.loads(path.read_text())
    rows = [row for row in data["tensors"] if row.get("stored_in") == "prefill"]
    rows[0]["stored_in"] = "decode"
    path.write_text(json.dumps(data))
    report = tpcompiler.open(tmp_path / "out").check()
    assert report.findings == [
        f"decode: {rows[0]['name']!r} is not in the files of 'decode', where the manifest says it is",
    ]
    rows[0]["stored_in"], before = "prefill", rows[0]["dtype"]
    rows[0]["dtype"] = "f16"
    path.write_text(json.dumps(data))
    assert f"decode: {rows[0]['name']!r} is f16, and in the files of 'prefill' it is {before}" in (
        tpcompiler.open(tmp_path / "out").check().findings
    )


@pytest.fixture(scope="module")
def attend(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dynamic, with a number of each rank."""
    out = tmp_path_factory.mktemp("attend") / "out"
    assert check(subject("attend").program, out).ok
    return out


@pytest.mark.slow
def test_a_graph_is_read_once(attend: Path) -> None:
    """Ranks that read other numbers have one graph."""
    first, second = read_ranks(tpcompiler.open(attend).only)
    read = torch.export.load(attend / rank_file(1))
    assert first.program is second.program
    assert str(second.program.graph) == str(read.graph)
    held = {**read.state_dict, **read.constants}
    assert all(torch.equal(second.state[name], value) for name, value in held.items())
    assert not torch.equal(first.state["rank_numbers"], second.state["rank_numbers"])


def test_a_damaged_file(attend: Path, tmp_path: Path) -> None:
    """A damage that is written out, its hash too: another rank's file."""
    shutil.copytree(attend, tmp_path / "out")
    path = tmp_path / "out" / "manifest.json"
    data = json.loads(path.read_text())
    files = [tmp_path / "out" / rank_file(rank) for rank in (0, 1)]
    for file, entries in zip(files, reversed(list(map(entries_of, files))), strict=True):
        with zipfile.ZipFile(file, "w") as archive:
            for name, content in entries.items():
                archive.writestr(f"{file.stem}/{name}", content)
        data["files"][file.name] = sha256(file)
    path.write_text(json.dumps(data))
    report = tpcompiler.open(tmp_path / "out").check()
    numbers, term = report.findings  # at the manifest's numbers, the graphs are right
    assert term.endswith("is not the term of rank 0 for P(sum)")
    assert numbers == "rank 0 holds the numbers [[1]], and the manifest says [[0]]"
