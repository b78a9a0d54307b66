"""What differs between the versions of torch: ops that one lacks, and one that is newer than all that were tried."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import torch

import tpcompiler
import tpcompiler.rules
from tpcompiler import _torch

ROOT = Path(__file__).parents[1]
PROBED = {f"aten::{name}" for name in ("__bases__", "__test__", "_mock_name")}  # by pytest, of names in test modules


def test_every_op_is_there() -> None:
    major, minor = map(int, torch.__version__.split(".")[:2])
    gone = {name for name, since in _torch.GONE.items() if since <= (major, minor)}
    assert set(_torch.MISSING) - PROBED == gone  # and no others: a name that is misspelt would be among them


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
