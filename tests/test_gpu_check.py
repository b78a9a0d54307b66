"""The check for machines with GPUs takes its whole way on the CPU."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.launch import fork_code
from tests.long import in_long_runs
from tools import gpu_steps, gpu_zoo

pytestmark = in_long_runs


def test_on_the_cpu(tmp_path: Path) -> None:
    """But for AOTInductor: tests/runtime/test_package.py has what this would."""
    words = "--device", "cpu", "--dtype", "bfloat16", "--ranks", "2", "--no-aoti", "--out", tmp_path / "gpu.md"
    done = fork_code("import sys\nfrom tools.gpu_check import main\nsys.exit(main())", *words, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "gpu.md").read_text() == done.stdout
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.endswith("| right |")]
    assert [(row[0], row[2]) for row in rows] == [
        ("| lock step, logits", "2"),
        ("| lock step, logits in float32", "2"),
        ("| saved files, gloo", "2"),
    ]
    assert "- NCCL, symm_mem: they take a GPU" in done.stdout
    assert "- AOTInductor: --no-aoti was given" in done.stdout


def test_models_of_the_zoo(capsys: pytest.CaptureFixture[str]) -> None:
    """Right, and without a collective not; in bfloat16 too."""
    assert gpu_zoo.main(["dlrm", "--device", "cpu", "--dtype", "bfloat16", "--ranks", "2"]) == 0
    model, summary = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"dlrm, 2 ranks: \S+ of \S+ right", model)
    assert (
        "bfloat16: 1 models, 1 conversions, 0 wrong, 0 not run; 1 without their first collective, 0 of them" in summary
    )


def test_a_step_of_a_rank(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without collectives, eagerly and compiled, beside the whole step."""
    monkeypatch.setattr(
        sys,
        "argv",
        ["gpu_steps", "--device", "cpu", "--shape", "tiny", "--ranks", "2", "--phase", "decode", "--dtype", "float32"],
    )
    assert gpu_steps.main() == 0
    rows = [line.split(" | ")[:4] for line in capsys.readouterr().out.splitlines()[2:]]
    assert rows == [["| tiny", "decode (8, 1)", ranks, run] for ranks in "12" for run in ("eager", "AOTInductor")]
