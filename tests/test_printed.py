"""What a file says of itself reaches a terminal, a plan and a picture as text, and as nothing else."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import tpcompiler
from tests.launch import fork_code
from tests.runtime.commands import call, refused, right
from tests.runtime.models import export_mlp
from tests.runtime.poisons import MODEL, entries_of, write_entries
from tpcompiler.errors import one_line, printable
from tpcompiler.ir.names import fold_names
from tpcompiler.judge.compare.compare import VerifyReport
from tpcompiler.judge.sound.check import CheckReport
from tpcompiler.runtime.artifact import MANIFEST
from tpcompiler.terminal.printed import format_bytes, format_unequal_bytes

MACHINE = "ideal"  # as if latencies were none: small models are worth cutting

ROOT = Path(__file__).parents[1]
EVIL = "\x1b]0;owned\x07\x1b[2J\r\x9b31m\u202e\ud800"
ESCAPED = r"\x1b]0;owned\x07\x1b[2J\r\x9b31m\u202e\ud800"


def test_texts() -> None:
    assert printable(f"a\tb\n{EVIL}é世") == f"a\tb\n{ESCAPED}é世"
    assert one_line("a\nb\u2028c") == r"a\nb\u2028c"


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (1125, "1.13 kB"),
        (-1500, "-1.5 kB"),
        (999_499, "999 kB"),
        (999_500, "1 MB"),
        (16_060_522_496, "16.1 GB"),
        (5 * 10**15, "5000 TB"),
    ],
)
def test_bytes_are_decimal(count: int, text: str) -> None:
    assert format_bytes(count) == text


def test_bytes_that_are_compared_look_different_where_they_are() -> None:
    assert format_unequal_bytes(12_288, 12_290) == ["12.288 kB", "12.29 kB"]
    assert format_unequal_bytes(12_288, 12_288) == ["12.3 kB", "12.3 kB"]
    assert format_unequal_bytes(10**12, 10**12 + 1, 10**12) == ["1 TB", "1.000000000001 TB", "1 TB"]


def test_a_finding_writes_no_line_of_its_own() -> None:
    """A name may be in it."""
    report = CheckReport(False, {"ranks": 2}, ["no 'x\nsound: all'"])
    assert str(report).splitlines() == ["NOT SOUND: 2 ranks", r"  no 'x\nsound: all'"]
    verdict = VerifyReport(False, 1.0, 1.0, [], first_diverging="x\nequal: all")
    assert str(verdict).splitlines()[1:] == [r"  first diverging value: x\nequal: all"]


def test_a_long_name_is_shortened_in_an_error() -> None:
    error = tpcompiler.PlanError(f"unknown style '{'9' * 100_000}'", help="write another", asked_by="x" * 3_000)
    said = str(error).splitlines()
    assert (said[0][:20], said[0][-4:]) == ("unknown style '99999", "999'")
    assert max(map(len, said)) < 2_100
    assert said[1] == "  help: write another"


@pytest.fixture
def out(out: Path, tmp_path: Path) -> Path:
    shutil.copytree(out, tmp_path / "out")
    return tmp_path / "out"


def change_manifest(out: Path, change: Callable[[Any], None]) -> None:
    data = json.loads((out / MANIFEST).read_text())
    change(data)
    (out / MANIFEST).write_text(json.dumps(data))


def say_evil(data: Any) -> None:
    for name in ("node", "module", "source", "reason"):
        data["collectives"][0][name] = EVIL
    data["collectives"][0]["why"] = "fallback"
    data["notes"] = [{"kind": "size", "text": f"{EVIL}\nsound: all"}]
    data["versions"] = {EVIL: EVIL}
    data["output_type"] = EVIL
    for rows in ("tensors", "inputs", "outputs"):
        data[rows][0]["name"] += f"{EVIL}\nsound: all"


@pytest.mark.sample(2)
@pytest.mark.parametrize("words", ["inspect {}", "check {}", "inspect {} --rank 0", "verify {} --against {}.pt2"])
def test_a_manifest_writes_no_control_characters(words: str, out: Path) -> None:
    torch.export.save(export_mlp(), f"{out}.pt2")
    change_manifest(out, say_evil)
    result = call(*words.format(out, out).split())
    assert printable(result.output) == result.output
    assert "Traceback" not in result.output
    assert ESCAPED in result.output or "--rank" in words or words.startswith("check")  # which have no need
    assert not re.search("^ *sound: all", result.output, re.MULTILINE)


def test_a_class_writes_no_line_into_the_plan(tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    torch.export.save(export_mlp(), path)
    entries = entries_of(path)
    data = json.loads(entries[MODEL])
    for node in data["graph_module"]["graph"]["nodes"]:
        stack = node["metadata"].get("nn_module_stack", "")
        node["metadata"]["nn_module_stack"] = re.sub(r"torch\.nn\.[\w.]*Linear", 'Li\n"**": colwise #', stack)
    entries[MODEL] = json.dumps(data).encode()
    write_entries(path, entries)
    plan = json.loads(right("inspect", path, "--json"))["plan"]
    assert '"**": colwise #' in plan
    assert yaml.safe_load(plan)["**"] == "auto"
    assert set(yaml.safe_load(plan).values()) <= {"replicate", "colwise", "rowwise", "auto"}


def test_a_picture_that_cannot_be_drawn(out: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever Graphviz ends of."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "dot").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "bin" / "dot").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    said = refused("inspect", out, "--format", "svg")
    assert said.startswith(f"Graphviz cannot draw {out}: ")
    assert said.endswith("help: use --format dot for its source text, or --format text\n")


def test_a_plan_in_a_manifest_is_not_deep(out: Path) -> None:
    deep: Any = "colwise"
    for _ in range(900):
        deep = {"a": deep}
    change_manifest(out, lambda data: data["plan"].update(up=deep))
    assert refused("inspect", out, "--json").startswith(f"{out / MANIFEST} is damaged: the plan has more than 8 tables")


@pytest.mark.timeout(60)
def test_names_that_differ_in_digits_are_folded_at_once() -> None:
    long = ".".join(str(number % 10) for number in range(1_800))
    names = {f"{long}.{last}": last for last in range(4)} | {f"1.{long[2:]}.0": 9}
    began = time.monotonic()
    assert len(fold_names(names)) == 5
    assert time.monotonic() - began < 10
    repeated = {f"layers.{layer}.{name}": name for layer in range(3) for name in ("up", "0.up", "1.up")}
    assert [pattern for pattern, _ in fold_names(repeated)] == ["layers.*.up", "layers.*.0.up", "layers.*.1.up"]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("to", "code", "said"),
    [
        (">/dev/full", 2, "cannot write standard output: No space left on device\n"),
        (">&-", 0, ""),
        ("| true", 0, ""),
    ],
)
def test_an_output_that_takes_nothing(to: str, code: int, said: str, out: Path) -> None:
    """It is no defect, and not the answer 'not sound' either."""
    words = f"set -o pipefail; {sys.executable} -m tpcompiler.cli inspect {out} {to}"
    done = subprocess.run(["bash", "-c", words], stderr=subprocess.PIPE, text=True, timeout=120, cwd=ROOT)
    assert (done.returncode, done.stderr) == (code, said)


SCRIPT = """
import sys
from tpcompiler.runtime.model_file import import_modules
name, site, here = sys.argv[1:]
sys.path.insert(0, site)
import_modules([name])
print(sorted(name for name in sys.modules if name.startswith("mine")), sys.path[-1] == here)
"""


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "imported"),
    [
        ("installed", "[]"),
        ("mine", "['mine', 'mine_too']"),
        ("mine_package.part", "['mine_package', 'mine_package.part']"),
    ],
)
def test_imports_of_an_import(name: str, imported: str, tmp_path: Path) -> None:
    """What an installed module tries to import does not come from where the command was called."""
    site, here = tmp_path / "site", tmp_path / "here"
    for folder in (site, here, here / "mine_package"):
        folder.mkdir()
    attempt = "try:\n    import mine_too\nexcept ImportError:\n    pass\n"
    (site / "installed.py").write_text(attempt)
    (here / "mine.py").write_text(attempt)
    (here / "mine_too.py").write_text("")
    (here / "mine_package" / "__init__.py").write_text("")
    (here / "mine_package" / "part.py").write_text("")
    done = fork_code(SCRIPT, name, site, here, cwd=here)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", f"{imported} False\n")
