"""Stages on the command line: convert, verify, run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.launch import fork_launched
from tests.runtime.models import PLAN_TEXT, export_mlp, mlp_inputs
from tpcompiler.cli.commands import app
from tpcompiler.runtime.inputs import read_tensors, write_tensors

MACHINE = "h100"


@pytest.mark.slow
def test_stages_are_converted_compared_and_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    program = export_mlp()
    torch.export.save(program, "model.pt2")
    Path("plan.yaml").write_text(PLAN_TEXT)
    write_tensors("in.safetensors", mlp_inputs())
    convert = "convert model.pt2 --mesh pp=2,tp=2 --plan plan.yaml -o out"
    for words in (convert, "verify out --against model.pt2 --inputs in.safetensors", "check out"):
        app(words.split(), standalone_mode=False)
    run = "--nproc-per-node 4 -m tpcompiler.cli run out --inputs in.safetensors --outputs made.safetensors"
    ended = fork_launched(run.split())
    assert not any(ended.codes), ended.shown
    wanted = program.module()(*mlp_inputs().values())
    for name, value in read_tensors("made.safetensors").items():
        torch.testing.assert_close(value, wanted[name], rtol=0, atol=1e-5)
