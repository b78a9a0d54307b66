"""A file of tests that has become slow is named, whatever the machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.durations import RECORD, VARIABLE, grown
from tests.launch import ROOT

RECORDED = {f"tests/test_{name}.py": 10.0 for name in "abcde"} | {"tests/test_short.py": 0.2}


@pytest.mark.parametrize("pace", [0.5, 1, 4], ids=lambda pace: f"{pace} times")
def test_what_has_grown_is_named_on_any_machine(pace: float) -> None:
    spent = {file: seconds * pace for file, seconds in RECORDED.items()}
    assert grown(spent, RECORDED) == []
    slow = {**spent, "tests/test_a.py": 40 * pace}
    assert [line.split()[0] for line in grown(slow, RECORDED)] == ["tests/test_a.py"]
    assert grown({**spent, "tests/test_a.py": 20 * pace}, RECORDED) == []  # noise
    assert grown({**spent, "tests/test_short.py": 3 * pace}, RECORDED) == []


def test_a_new_file_has_to_be_fast_or_recorded() -> None:
    assert grown({**RECORDED, "tests/test_new.py": 20.0}, RECORDED) == []
    assert grown({**RECORDED, "tests/test_new.py": 60.0}, RECORDED) == [
        "tests/test_new.py takes 60 s, and took 5 s (on a machine like this one): make it faster, or record it: "
        "TPCOMPILER_DURATIONS=record make test"
    ]


@pytest.mark.slow
def test_the_run_says_so(tmp_path: Path) -> None:
    """In a run of its own, of files that sleep."""
    (tmp_path / "conftest.py").write_text(
        "from tests import durations\n"
        "durations.RECORD, durations.SECONDS, durations.SHORT = durations.Path('record.json'), 1.5, 0.01\n"
        "def pytest_configure(config):\n"
        f"    config.pluginmanager.register(durations.Durations(__import__('os').environ['{VARIABLE}']))\n"
    )
    for name in "abc":
        (tmp_path / f"test_{name}.py").write_text("import time\ndef test(): time.sleep(0.05)\n")

    def run(mode: str) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "."]
        return subprocess.run(
            words,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), VARIABLE: mode},
            capture_output=True,
            text=True,
            timeout=60,
        )

    assert run("record").returncode == 0
    assert json.loads((tmp_path / "record.json").read_text()).keys() == {"test_a.py", "test_b.py", "test_c.py"}
    assert (again := run("check")).returncode == 0, again.stdout
    (tmp_path / "test_a.py").write_text("import time\ndef test(): time.sleep(3)\n")
    slow = run("check")
    assert slow.returncode == 0  # a time is no failure
    assert "test_a.py takes 3 s" in slow.stdout


def test_the_record_names_files_that_are_there() -> None:
    gone = [file for file in json.loads(RECORD.read_text()) if not (ROOT / file).exists()]
    assert not gone
