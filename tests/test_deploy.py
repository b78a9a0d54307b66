"""docs/deploy.md runs as it stands: every block, in order, in one empty directory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "deploy.md"
SECONDS = 300

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PAGE.exists(), reason="an installed wheel has no docs beside the tests"),
]


def test_the_page_runs(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, words in (("tpcompiler", "-m tpcompiler.cli"), ("torchrun", "-m torch.distributed.run"), ("python", "")):
        (tools / name).write_text(f'#!/bin/sh\nexec {sys.executable} -W ignore {words} "$@"\n')
        (tools / name).chmod(0o755)
    paths = os.pathsep.join(filter(None, (str(PAGE.parents[1]), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    (tmp_path / "work").mkdir()
    said = ""
    for language, block in re.findall(r"```(python|bash)\n(.*?)```", PAGE.read_text(), re.DOTALL):
        if language == "python":
            (name,) = re.findall(r"^# (\w+\.py)$", block, re.MULTILINE)
            (tmp_path / "work" / name).write_text(block)
            continue
        done = subprocess.run(
            ["sh", "-e", "-c", block],
            cwd=tmp_path / "work",
            env=environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        said += done.stdout
    assert "tensors without values" in said
    (cut,) = re.findall(r"^rank 0: \(2, 6, 1000\) (\[.*\])$", said, re.MULTILINE)
    ranks = dict(re.findall(r"^([01]) (\[.*\])$", said, re.MULTILINE))
    assert ranks == {"0": cut, "1": cut}
    done = subprocess.run([tools / "python", "in_python.py"], cwd=tmp_path / "work", env=environment, timeout=SECONDS)
    assert done.returncode == 0
    assert (tmp_path / "work" / "mlp.pt2").stat().st_size < 100_000
