"""The check for machines with GPUs takes its whole way on the CPU, and can fail."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch import fork_code
from tests.long import in_long_runs
from tests.zoo.index import CASES
from tools import gpu_steps, gpu_zoo
from tools.gpu_check import Table, on_device

pytestmark = pytest.mark.slow


def check(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return fork_code("import sys\nfrom tools.gpu_check import main\nsys.exit(main())", *words, timeout=400)


@in_long_runs
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
    assert "- NCCL, symm_mem: they take a GPU" in done.stdout
    assert "- AOTInductor: --no-aoti was given" in done.stdout


@in_long_runs
def test_models_of_the_zoo(capsys: pytest.CaptureFixture[str]) -> None:
    """Right, and without a collective not; in bfloat16 too."""
    assert gpu_zoo.main(["mlp_mixer", "--device", "cpu", "--dtype", "bfloat16", "--ranks", "2"]) == 0
    model, summary = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"mlp_mixer, 2 ranks: \S+ of \S+ right", model)
    assert (
        "bfloat16: 1 models, 1 conversions, 0 wrong, 0 not run; 1 without their first collective, 0 of them" in summary
    )


@in_long_runs
def test_what_is_wrong_is_said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A damage that does none, and what cannot be converted."""
    case, exported = CASES["mlp_mixer"], CASES["mlp_mixer"].export(False)
    whole = on_device(exported, "cpu")
    monkeypatch.setattr(gpu_zoo, "without_collective", lambda program, name: program)
    assert gpu_zoo._compare(case, exported, whole, "cpu", 2).caught is False
    assert "degree 0" in gpu_zoo._compare(case, exported, whole, "cpu", 0).reason


@in_long_runs
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
