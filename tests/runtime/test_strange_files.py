"""Files that torch writes and reads, and that are strange all the same; limits that torch does not ask for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import export

from tests.launch import fork_code
from tests.runtime.commands import refused
from tpcompiler import ArtifactError
from tpcompiler.runtime.model_file import import_modules, read_model

X = torch.ones(2, 8)


def test_a_large_weight_that_is_one_number(tmp_path: Path) -> None:
    """Cut, it would be whole on every rank: of a file of 10 kB, gigabytes."""
    layer = nn.Linear(8, 1 << 22, bias=False)
    layer.weight = nn.Parameter(torch.zeros(()).expand(1 << 22, 8))
    torch.export.save(export(layer, (X,)), tmp_path / "model.pt2")
    with pytest.raises(
        ArtifactError, match=r"'weight' is \[4194304, 8\], 134,217,728 bytes, of which the file holds 4"
    ):
        read_model(tmp_path / "model.pt2")
    layer.weight = nn.Parameter(torch.zeros(()).expand(16, 8))  # a small one may be a constant
    torch.export.save(export(layer, (X,)), tmp_path / "model.pt2")
    read_model(tmp_path / "model.pt2")


@pytest.mark.parametrize(
    ("examples", "said"),
    [
        (((X.to("meta"),), {}), "its example inputs have a tensor on the meta device"),
        (((X.to_sparse(),), {}), "its example inputs have a tensor of layout torch.sparse_coo"),
        (([X], {}), "its example inputs are not the arguments that its program takes"),
    ],
)
def test_examples_that_are_no_arguments(examples: Any, said: str, tmp_path: Path) -> None:
    program = export(nn.Linear(8, 4), (X,))
    program._example_inputs = examples
    torch.export.save(program, tmp_path / "model.pt2")
    with pytest.raises(ArtifactError, match=re.escape(said)):
        read_model(tmp_path / "model.pt2")


def test_a_limit_on_the_size_of_files(tmp_path: Path) -> None:
    """torch's writer would end the process."""
    torch.export.save(export(nn.Linear(8, 4), (X,)), tmp_path / "model.pt2")
    (tmp_path / "plan.yaml").write_text("weight: R\n")
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (512, 512))\n"
    words = "convert", "model.pt2", "--tp", "2", "--plan", "plan.yaml", "-o", "out"
    done = fork_code(f"{limit}from tpcompiler.cli import main\nmain()", *words, cwd=tmp_path)
    assert (done.returncode, done.stderr.splitlines()[0]) == (2, "cannot write out: File too large"), done.stderr
    assert not (tmp_path / "out").exists()


def test_one_axis_twice(tmp_path: Path) -> None:
    torch.export.save(export(nn.Linear(8, 4), (X,)), tmp_path / "model.pt2")
    (tmp_path / "plan.yaml").write_text("weight: R\n")
    asked = ["convert", tmp_path / "model.pt2", "--tp", "2", "--plan", tmp_path / "plan.yaml", "--dry-run"]
    assert "--input input=tp:R,tp:S(0) names no placement" in refused(*asked, "--input", "input=tp:R,tp:S(0)")


def test_a_module_that_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "leaves_at_once.py").write_text("raise SystemExit(0)\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArtifactError, match="cannot import leaves_at_once: SystemExit: 0"):
        import_modules(["leaves_at_once"])
