"""The judges by the command line: `verify` and `check` of an artifact that is right, and of one that is not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.runtime.commands import call, right
from tests.runtime.models import mlp_inputs
from tpcompiler.runtime.artifact import sha256


@pytest.mark.slow
def test_verify_an_equal_artifact(model: Path, out: Path, tmp_path: Path) -> None:
    inputs = tmp_path / "inputs.safetensors"
    save_file(mlp_inputs(seed=7), inputs)
    text = right("verify", out, "--against", model)
    assert text.startswith("equal: max abs err ")
    assert [line.split(":")[0] for line in text.splitlines()[1:]] == ["  ok  hidden", "  ok  cache", "  ok  logits"]
    assert right("verify", out, "--against", model, "--inputs", inputs).startswith("equal: ")


@pytest.fixture
def tampered(out: Path, tmp_path: Path) -> Path:
    """An artifact in which two weights of rank 1 have changed places, with a hash that fits."""
    directory = shutil.copytree(out, tmp_path / "tampered")
    path, manifest = directory / "rank_1.pt2", directory / "manifest.json"
    program = torch.export.load(path)
    first, second = (program.state_dict[f"layers.{layer}.up.weight"] for layer in (0, 1))
    with torch.no_grad():
        kept = first.clone()
        first.copy_(second)
        second.copy_(kept)
    torch.export.save(program, path)
    data = json.loads(manifest.read_text())
    data["files"]["rank_1.pt2"] = sha256(path)
    manifest.write_text(json.dumps(data))
    return directory


def test_verify_finds_swapped_weights(model: Path, tampered: Path) -> None:
    result = call("verify", tampered, "--against", model)
    assert (result.exit_code, result.stderr) == (1, "")
    lines = result.stdout.splitlines()
    assert lines[0].startswith("NOT EQUAL: ")
    assert [line.split(":")[0] for line in lines[1:4]] == ["  BAD hidden", "  ok  cache", "  BAD logits"]
    assert lines[4].startswith("  first diverging value: 'linear' (aten.linear.default, claimed S(1))")
    result = call("verify", tampered, "--against", model, "--json")
    assert result.exit_code == 1
    data = json.loads(result.stdout)
    assert (data["ok"], [row["ok"] for row in data["outputs"]]) == (False, [False, True, False])


@pytest.mark.slow
def test_check(model: Path, out: Path, tampered: Path) -> None:
    """Without the model nobody can say which weights are right; with it they are compared bit for bit."""
    sound = "sound: 2 ranks, "
    unread = "weights were not compared with the model's: pass --against MODEL.pt2, or --checkpoint DIR"
    for directory in (out, tampered):
        said = right("check", directory).splitlines()
        assert (said[0].startswith(sound), said[-1]) == (True, unread)
    said = right("check", out, "--against", model).splitlines()
    assert (said[0].startswith(sound), len(said)) == (True, 1)
    data = json.loads(right("check", out, "--json"))
    assert (data["ok"], data["weights_compared"]) == (True, False)
    result = call("check", tampered, "--against", model)
    assert (result.exit_code, result.stderr) == (1, "")
    assert "'layers.0.up.weight': the ranks' shares do not make the original's tensor" in result.stdout
