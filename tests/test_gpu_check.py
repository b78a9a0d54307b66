"""The check for machines with GPUs takes its whole way on the CPU, and can fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch import fork_code
from tests.long import LONG
from tools import gpu_steps
from tools.gpu_check import Table

pytestmark = pytest.mark.slow


def check(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return fork_code("import sys\nfrom tools.gpu_check import main\nsys.exit(main())", *words, timeout=400)


def test_on_the_cpu(tmp_path: Path) -> None:
    """But for AOTInductor: tests/runtime/test_package.py has what this would."""
    done = check("--device", "cpu", "--dtype", "bfloat16", "--ranks", "2", "--no-aoti", "--out", tmp_path / "gpu.md")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "gpu.md").read_text() == done.stdout
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.endswith("| right |")]
    assert [(row[0], row[2]) for row in rows] == [
        ("| lock step, logits", "2"),
        ("| lock step, logits in float32", "2"),
        ("| saved files, gloo", "2"),
    ]
    assert "- NCCL, symm_mem: they take one GPU for each rank, and this machine has 0" in done.stdout
    assert "- AOTInductor: --no-aoti was given" in done.stdout


@pytest.mark.skipif(not os.environ.get(LONG), reason="make trust runs it: it compiles two programs for their speed")
def test_a_step_of_a_rank(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without collectives, eagerly and compiled, beside the whole step."""
    monkeypatch.setattr(
        sys,
        "argv",
        ["gpu_steps", "--device", "cpu", "--shape", "tiny", "--ranks", "2", "--phase", "decode", "--dtype", "float32"],
    )
    assert gpu_steps.main() == 0
    rows = [line.split(" | ")[:4] for line in capsys.readouterr().out.splitlines()[2:]]
    assert rows == [["| tiny", "decode (8, 1)", "2", run] for run in ("eager", "AOTInductor")]


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = check()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "torch finds no CUDA device here: nothing was checked (try --device cpu)\n"


@pytest.mark.parametrize(("error", "right"), [(0.5, True), (2.0, False), (float("nan"), False)])
def test_one_wrong_row_is_enough(error: float, right: bool) -> None:
    table = Table()
    assert not table.right, "nothing was run"
    table.add("check", "model", 2, 0.0, 1.0)
    table.add("check", "model", 2, error, 1.0)
    assert table.right is right
    table.broken.append(("check", "it raised"))
    assert not table.right
    assert "BROKEN:\n\n- check: it raised\n" in table.text("cpu")
