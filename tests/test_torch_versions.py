"""What differs between the versions of torch: ops that one lacks, and one that is newer than all that were tried."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import tpcompiler
import tpcompiler.rules
from tpcompiler import _torch

ROOT = Path(__file__).parents[1]


def test_every_op_is_there() -> None:
    major, minor = map(int, torch.__version__.split(".")[:2])
    gone = {name for name, since in _torch.GONE.items() if since <= (major, minor)}
    assert set(_torch.MISSING) == gone  # and no others: a name that is misspelt would be among them


def test_an_op_that_torch_lacks_is_none_that_a_program_calls() -> None:
    ops = _torch.ops._Ops("aten")
    assert ops.add.Tensor is torch.ops.aten.add.Tensor
    gone = ops.no_such_op.default
    assert str(gone) == "aten.no_such_op.default"
    assert gone not in {torch.ops.aten.add.Tensor}
    assert _torch.op_overload(gone) is None
    assert "aten::no_such_op" in _torch.MISSING
    _torch.MISSING.remove("aten::no_such_op")


def test_no_other_file_names_an_op_of_torch() -> None:
    """It would be an AttributeError on the torch that lacks it."""
    files = [file for part in ("tpcompiler", "passes") for file in (ROOT / part).rglob("*.py")]
    assert len(files) > 100
    named = [file.name for file in files if re.search(r"\btorch\.ops\.[a-z_]", file.read_text(encoding="utf-8"))]
    assert named == []


@pytest.mark.parametrize(
    ("version", "said"), [("2.15.1", False), ("2.16.0a0+git", True), ("3.0", True), ("dev", False)]
)
def test_a_newer_torch_is_a_warning(version: str, said: bool) -> None:
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        _torch.warn_of_newer(version)
    assert [str(each.message) for each in heard] == [
        f"torch {version} is newer than 2.15, the newest that tpcompiler was tested with: "
        "if something fails, install torch 2.15"
    ] * said
    assert all(each.category is tpcompiler.TpCompilerWarning for each in heard)


@pytest.mark.slow
def test_the_command_line_says_it_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "text.pt2").write_text("no program")
    script = "import torch; torch.__version__ = '9.0'\nfrom tpcompiler.cli import main\nmain()"
    ran = subprocess.run(
        [sys.executable, "-c", script, "inspect", "text.pt2"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert ran.stderr.splitlines()[0].startswith("warning: torch 9.0 is newer than 2.15")
    assert "text.pt2 is a text file" in ran.stderr
    assert ran.returncode == 2


@pytest.mark.slow
def test_a_trace_leaves_the_methods_of_modules() -> None:
    """What is traced is as `make_fx` has it, which puts others into their place."""
    call, found = torch.nn.Module.__call__, []

    def body(x: torch.Tensor) -> torch.Tensor:
        found.append(torch.nn.Module.__call__ is call)
        return x.relu() + 1

    assert str(_torch.trace_ops(body, torch.ones(2))) == str(make_fx(body)(torch.ones(2)).graph)
    assert found == [True, False]
    assert "__fx_already_patched" not in vars(call)
