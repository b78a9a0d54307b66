"""docs/deploy.md runs as it stands: every block, in order, in one empty directory."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runtime.commands import right

PAGE = Path(__file__).parents[1] / "docs" / "deploy.md"
SECONDS = 300

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PAGE.exists(), reason="an installed wheel has no docs beside the tests"),
]


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands of this package in this process, which saves a minute of imports, all others by a shell."""
    pytest.importorskip("transformers")
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, words in (("torchrun", "-m torch.distributed.run"), ("python", "")):
        (tools / name).write_text(f'#!/bin/sh\nexec {sys.executable} -W ignore {words} "$@"\n')
        (tools / name).chmod(0o755)
    paths = os.pathsep.join(filter(None, (str(PAGE.parents[1]), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    said = ""
    for language, block in re.findall(r"```(python|bash)\n(.*?)```", PAGE.read_text(), re.DOTALL):
        if language == "python":
            (name,) = re.findall(r"^# (\w+\.py)$", block, re.MULTILINE)
            (tmp_path / "work" / name).write_text(block)
            continue
        for line in block.splitlines():
            if line.startswith("tpcompiler "):
                said += right(*line.split()[1:])
                continue
            shell = ["sh", "-e", "-c", line]
            done = subprocess.run(shell, env=environment, capture_output=True, text=True, timeout=SECONDS)
            assert done.returncode == 0, done.stdout + done.stderr
            said += done.stdout
    assert "equal: max abs err" in said
    (cut,) = re.findall(r"^rank 0: \(2, 6, 1000\) (\[.*\])$", said, re.MULTILINE)
    assert re.findall(r"^uncut: (\[.*\])$", said, re.MULTILINE) == [cut]
    done = subprocess.run([tools / "python", "in_python.py"], cwd=tmp_path / "work", env=environment, timeout=SECONDS)
    assert done.returncode == 0
    assert (tmp_path / "work" / "mlp.pt2").stat().st_size < 100_000
    _compare(tmp_path / "work", json.loads(re.findall(r"^generated: (\[.*\])$", said, re.MULTILINE)[0]))


def _compare(work: Path, generated: list[list[int]]) -> None:
    """With what the checkpoint gives: transformers' own tokens, and the same bits."""
    from safetensors.torch import load_file
    from transformers import LlamaForCausalLM

    model: Any = LlamaForCausalLM.from_pretrained(work / "checkpoint")
    ids = torch.arange(10).reshape(2, 5)
    asked = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "pad_token_id": 0, "eos_token_id": None}
    wanted = model.generate(ids, do_sample=False, **asked)
    assert generated == wanted[:, 5:].tolist()
    merged, weights = load_file(work / "merged.safetensors"), model.state_dict()
    assert merged.keys() == weights.keys()
    assert all(torch.equal(merged[name], weights[name]) for name in merged)
    back = torch.export.load(work / "merged.pt2")
    assert all(torch.equal(back.state_dict[name], weights[name]) for name in weights)
