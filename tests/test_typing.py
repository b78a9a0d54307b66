"""A type checker knows the public names, and what they return."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import tpcompiler

pytest.importorskip("mypy")
HOME = Path(tpcompiler.__file__).parents[1]
SNIPPET = """\
import torch
import tpcompiler

module = tpcompiler.load("out", training=True)
reveal_type(module.clip_grad_norm_(1.0))  # "torch._tensor.Tensor"
reveal_type(module.exported_program)  # ExportedProgram"
reveal_type(module["decode"])  # RankModule"
with module.no_sync():
    module(torch.ones(2)).backward()
optimizer = torch.optim.AdamW(module.parameters())
reveal_type(module.distributed_state(optimizer))  # dict[str, Any]]"
module.clip_grad_nrm_(1.0)  # not callable
module.clip_grad_norm_("1.0")  # incompatible type
try:
    reveal_type(tpcompiler.diagnose(module.exported_program, devices=["h100", "l40s"]).fastest)  # "str"
except (tpcompiler.ShardingError, tpcompiler.MeshEror) as error:  # has no attribute "MeshEror"
    print(error)
tpcompiler.load("out", trainig=True)  # Unexpected keyword argument
"""


@pytest.mark.slow
def test_a_typo_is_an_error(tmp_path: Path) -> None:
    """Every line with a comment, and no other, has a message that contains the comment."""
    (tmp_path / "snippet.py").write_text(SNIPPET)
    command = [sys.executable, "-m", "mypy", "--strict", "--no-pretty", tmp_path / "snippet.py"]
    printed = subprocess.run(command, cwd=HOME, capture_output=True, text=True, check=False).stdout
    found = dict[int, str]()
    for line, text in re.findall(r"snippet\.py:(\d+): (?:error|note): (.*)", printed):
        found[int(line)] = f"{found.get(int(line), '')} {text}"
    wanted = {at: line.partition("  # ")[2] for at, line in enumerate(SNIPPET.splitlines(), 1) if "  # " in line}
    assert found.keys() == wanted.keys(), printed
    for at, text in wanted.items():
        assert text in found[at], printed
