"""The models that a newcomer copies first, README's and the first guide's, through every command that takes them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.export import ExportedProgram

import tpcompiler
from tests.runtime.commands import call

ROOT = Path(__file__).parents[1]
README = {"0": "colwise", "2": "rowwise"}
GUIDE = dict.fromkeys(["q", "k", "v", "up"], "colwise") | dict.fromkeys(["o", "down"], "rowwise")
PLANS = {"README.md": README, "docs/first-model.md": {f"blocks.*.{n}": s for n, s in GUIDE.items()} | {"**": "auto"}}

pytestmark = pytest.mark.skipif(not (ROOT / "docs").exists(), reason="an installed wheel has no docs beside the tests")


def model_of(page: str, folder: Path) -> tuple[Path, ExportedProgram]:
    """Run the page's script that exports a model; return its file and the program."""
    (code,) = re.findall(r"```python\n(.*?torch\.export\.export.*?)```", (ROOT / page).read_text("utf-8"), re.DOTALL)
    code = code.split("program = tpcompiler")[0]
    here = os.getcwd()
    os.chdir(folder)
    try:
        names: dict[str, object] = {}
        exec(code, names)
    finally:
        os.chdir(here)
    if not (folder / "model.pt2").exists():
        torch.export.save(names["exported"], folder / "model.pt2")  # type: ignore[arg-type]
    return folder / "model.pt2", torch.export.load(folder / "model.pt2")


def works(*words: object) -> str:
    """What a call prints that must succeed."""
    result = call(*words)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("page", PLANS)
def test_every_command_takes_it(page: str, tmp_path: Path) -> None:
    model, program = model_of(page, tmp_path)
    out, plan, inputs = tmp_path / "out", tmp_path / "plan.yaml", tmp_path / "in.safetensors"
    plan.write_text("".join(f'"{name}": {style}\n' for name, style in PLANS[page].items()))
    value = program.example_inputs[0][0]  # type: ignore[index]
    save_file({"input": value.contiguous()}, inputs)
    works("inspect", model)
    works("plan", model)
    works("plan", model, "--tp", 2, "-o", tmp_path / "found.yaml")
    works("convert", model, "--tp", 2, "--plan", tmp_path / "found.yaml", "--dry-run")
    works("convert", model, "--tp", 2, "--plan", plan, "-o", out)
    works("verify", out, "--against", model)
    works("verify", out, "--against", model, "--inputs", inputs)
    works("check", out)
    works("inspect", out)
    works("inspect", out, "--format", "html", "-o", tmp_path / "out.html")
    sent = tpcompiler.open(out).manifest().collectives[0].node
    for name in ("input", "linear", next(iter(program.state_dict)), sent):
        works("explain", out, name)
    works("explain", out)
    works("reshard", out, "--tp", 4, "-o", tmp_path / "out4")
    works("verify", tmp_path / "out4", "--against", model)
    assert call("diff", out, tmp_path / "out4").exit_code == 1  # they differ
    works("reshard", out, "--single-device", "-o", tmp_path / "again.pt2")
    works("convert", tmp_path / "again.pt2", "--tp", 2, "--plan", plan, "--layout", "shared", "-o", tmp_path / "shared")
    for each in (out, tmp_path / "shared"):
        works("package", each)
        want = program.module()(value)
        for more in ((), ("--compiled",)):
            given = torch_run(each, inputs, tmp_path / "result.safetensors", *more)
            torch.testing.assert_close(next(iter(given.values())), want)


def torch_run(out: Path, inputs: Path, results: Path, *more: str) -> dict[str, torch.Tensor]:
    """Run an artifact on two gloo ranks, and return its outputs."""
    words = [
        "--nproc-per-node",
        "2",
        "-m",
        "tpcompiler.cli",
        "run",
        out,
        "--inputs",
        inputs,
        "--outputs",
        results,
        *more,
    ]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    return load_file(results)


def test_a_plan_that_names_all_layers_is_not_taken_for_the_search(tmp_path: Path) -> None:
    """Its artifact has the bytes of one that the search made; where this search decides otherwise, it says so."""
    _, exported = model_of("README.md", tmp_path)
    program = tpcompiler.parallelize(exported, 2, {**README, "**": "auto"}, machine="h100")
    reasons = {name: program.explain(name, machine="h100").reason for name in ("0.weight", "2.weight")}
    assert reasons == {
        "0.weight": "the artifact's plan: colwise (a search for h100: replicate)",
        "2.weight": "the artifact's plan: rowwise (a search for h100: replicate)",
    }
