"""The compiler is deterministic: the same program, plan and mesh give the same bytes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tpcompiler
from tests.launch import ROOT
from tests.promises.models import CASES, IDS, ODD, Odd, exported
from tests.runtime.commands import right
from tpcompiler.runtime.artifact import sha256


def hashes(directory: Path) -> dict[str, str]:
    found = {path.name: sha256(path) for path in directory.iterdir()}
    assert {name for name in found if not name.startswith("program")} == {
        "manifest.json", "model.pt2", "rank_0.pt2", "rank_1.pt2",
    }  # fmt: skip
    return found


@pytest.mark.slow
@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", ["odd_dynamic", "llama_dynamic"])
def test_twice_in_one_process(name: str, tmp_path: Path) -> None:
    """Neither the order of the ranks nor what was converted in between shows."""
    plan = CASES[name].plan
    first, second = (tpcompiler.parallelize(exported(name), 2, plan) for _ in range(2))
    first.save(tmp_path / "first")
    second.rank_program(1)
    second.collectives()
    tpcompiler.parallelize(exported(name), 4, plan).rank_program(3)
    second.save(tmp_path / "second")
    assert hashes(tmp_path / "first") == hashes(tmp_path / "second")


@pytest.mark.slow
def test_in_a_fresh_process_and_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line, here and under a hash seed of its own."""
    torch.export.save(exported("odd_dynamic"), tmp_path / "model.pt2")
    (tmp_path / "plan.yaml").write_text("".join(f'"{k}": {v}\n' for k, v in ODD.items()))
    words = ["convert", tmp_path / "model.pt2", "--tp", 2, "--plan", tmp_path / "plan.yaml", "-o", "out"]
    one, other = tmp_path / "one", tmp_path / "two" / "deeper"
    for folder in (one, other):
        folder.mkdir(parents=True)
    done = subprocess.run(
        [sys.executable, "-m", "tpcompiler.cli", *map(str, words)],
        cwd=one,
        env={**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    monkeypatch.chdir(other)
    right(*words)
    assert hashes(one / "out") == hashes(other / "out")


@pytest.mark.slow
def test_another_program_gives_other_bytes(tmp_path: Path) -> None:
    """Negative control: one element of one weight."""
    program = torch.export.export(Odd(), (IDS,))
    tpcompiler.parallelize(program, 2, ODD).save(tmp_path / "one")
    program.state_dict["head.weight"].data[0, 0] += 1  # a row that rank 0 holds
    tpcompiler.parallelize(program, 2, ODD).save(tmp_path / "other")
    one, other = hashes(tmp_path / "one"), hashes(tmp_path / "other")
    differ = {name for name, digest in one.items() if other[name] != digest}
    assert differ == {"manifest.json", "rank_0.pt2"}  # of the model, and with programs, no weights are kept


def test_no_path_of_the_compiler_is_written(tmp_path: Path) -> None:
    """The files name source lines of the model, as the export does, but neither folder nor process of the compiler."""
    tpcompiler.parallelize(exported("odd"), 2, ODD).save(tmp_path / "out")
    for name in hashes(tmp_path / "out"):
        content = (tmp_path / "out" / name).read_bytes()
        assert str(tmp_path).encode() not in content
        assert str(ROOT / "passes").encode() not in content
        assert b"graph_id" not in content  # torch's from_node: the addresses of graphs in memory
