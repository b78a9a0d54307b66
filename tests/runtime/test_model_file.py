"""Reading a .pt2: quietly, and with the modules it needs. What else it refuses is in tests/bad_input/table.py."""

from __future__ import annotations

import sys
import threading
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._export.serde import serialize
from torch.export import Dim

import tpcompiler
from tests.launch import fork_code
from tests.passes.stages import Call
from tests.runtime.models import PLAN, Mlp, export_mlp, mlp_inputs
from tpcompiler._torch import quick_files, save_program, tree_flatten
from tpcompiler.errors import ArtifactError
from tpcompiler.ir import edit
from tpcompiler.ir.local import fake_mode_of
from tpcompiler.runtime import pt2_check
from tpcompiler.runtime.model_file import import_modules, read_model


def test_a_model_is_read_under_any_name(model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "model.bin"  # torch warns about other suffixes
    other.write_bytes(model.read_bytes())
    inputs = mlp_inputs().values()
    expected, found = (read_model(path).module()(*inputs)["logits"] for path in (model, other))
    assert torch.equal(expected, found)
    assert capfd.readouterr() == ("", "")


def test_what_is_written_in_less_time_is_what_torch_writes(tmp_path: Path) -> None:
    program = export_mlp()
    for name in ("torch", "ours"):
        (tmp_path / name).mkdir()
    torch.export.save(program, tmp_path / "torch" / "model.pt2")
    save_program(program, tmp_path / "ours" / "model.pt2")
    theirs, ours = (_entries(tmp_path / name / "model.pt2") for name in ("torch", "ours"))
    assert ours == theirs
    assert len(ours) > 3


def _entries(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.mark.slow
def test_what_is_read_in_less_time_is_what_torch_reads(tmp_path: Path) -> None:
    """With sizes that are sums and products of dynamic ones, half floats, strides, a parameter, and infinity."""
    batch, length = Dim("batch", max=64), Dim("length", min=2)
    module = Call(
        lambda self, x, y: (
            torch.cat([x, y], 1).transpose(0, 1).half(),
            self.up(x).flatten(0, 1),
            x.masked_fill(x > 0.5, -torch.inf),
        ),
        up=nn.Linear(6, 4),
    )
    example = torch.randn(3, 5, 6), torch.randn(3, 2, 6)
    sizes = {0: batch, 1: length}
    program = torch.export.export(module, example, dynamic_shapes={"x": sizes, "y": {0: batch, 1: Dim("more")}})
    torch.export.save(program, tmp_path / "model.pt2")
    reader = vars(serialize.GraphModuleDeserializer).copy()
    theirs, ours = torch.export.load(tmp_path / "model.pt2"), read_model(tmp_path / "model.pt2")
    assert str(ours) == str(theirs)
    assert ours.range_constraints == theirs.range_constraints
    for own, other in zip(ours.graph.nodes, theirs.graph.nodes, strict=True):
        assert _layouts(own.meta.get("val")) == _layouts(other.meta.get("val"))
        constants, of_theirs = (tree_flatten((node.args, node.kwargs))[0] for node in (own, other))
        assert [*map(type, constants)] == [*map(type, of_theirs)]
    assert {value.fake_mode for node in ours.graph.nodes for value in edit.outputs(node)} == {fake_mode_of(ours.graph)}
    assert vars(serialize.GraphModuleDeserializer) == reader


def test_what_a_difference_of_sizes_says_is_noted(tmp_path: Path) -> None:
    """Who divides one of the sizes has to know that it may not exceed the other."""
    module = Call(lambda self, x, y: (x[y.shape[0] :] * 2, y))
    example, sizes = (torch.randn(12, 8), torch.randn(4, 3)), ({0: Dim.AUTO}, {0: Dim.AUTO})
    torch.export.save(torch.export.export(module, example, dynamic_shapes=sizes), tmp_path / "model.pt2")
    theirs, ours = (
        [str(guard.expr) for guard in fake_mode_of(read(tmp_path / "model.pt2").graph).shape_env.guards]  # type: ignore[union-attr]
        for read in (torch.export.load, read_model)
    )
    assert ours == theirs
    assert len(ours) == 2


def test_threads_take_turns() -> None:
    """Or else the last to leave puts back what the first replaced, and torch's reader is never its own again."""
    own, inside = vars(serialize)["canonicalize"], threading.Event()

    def enter() -> None:
        with quick_files():
            inside.set()

    other = threading.Thread(target=enter)
    with quick_files():
        other.start()
        assert not inside.wait(0.2)
    other.join(30)
    assert inside.is_set()
    assert vars(serialize)["canonicalize"] is own


def _layouts(value: Any) -> list[str]:
    kinds = "dtype", "device", "requires_grad", "is_leaf"
    return [
        f"{list(each.shape)} {each.stride()} {[getattr(each, kind) for kind in kinds]}"
        for each in tree_flatten(value)[0]
        if isinstance(each, torch.Tensor)
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with a GPU can read this file")
def test_weights_on_a_device_that_is_not_here(tmp_path: Path) -> None:
    """As torch.export.save writes a model that was exported on a GPU."""
    torch.export.save(export_mlp(), tmp_path / "cpu.pt2")
    path = tmp_path / "cuda.pt2"
    with zipfile.ZipFile(tmp_path / "cpu.pt2") as here, zipfile.ZipFile(path, "w") as there:
        for name in here.namelist():
            content = here.read(name)
            if name.endswith(".json"):
                content = content.replace(b'"type": "cpu", "index": null', b'"type": "cuda", "index": 0')
            there.writestr(name, content)
    with pytest.raises(ArtifactError) as raised:
        read_model(path)
    assert str(raised.value) == (
        f"{path} has tensors on CUDA, which torch does not find here\n"
        '  help: read it on a machine with a GPU, or export the model on the CPU and convert with device_type="cuda"'
    )


CUSTOM = """
import torch

@torch.library.custom_op("toy::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2

@twice.register_fake
def _(x):
    return torch.empty_like(x)
"""


class Twice(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.toy.twice(x)


def test_a_module_in_the_working_directory_registers_an_op(tmp_path: Path) -> None:
    exec(CUSTOM, {})
    torch.export.save(torch.export.export(Twice(), (torch.ones(2),)), tmp_path / "model.pt2")
    (tmp_path / "my_ops.py").write_text(CUSTOM)
    code = """
from tpcompiler.errors import ArtifactError
from tpcompiler.runtime.model_file import import_modules, read_model
try:
    read_model("model.pt2")
except ArtifactError as error:
    print(error.message)
import_modules(["my_ops"])
print(read_model("model.pt2").graph_module.code.count("toy.twice"))
"""
    done = fork_code(code, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (
        f"model.pt2 calls the op toy.twice.default, which this torch {torch.__version__} does not have\n1\n"
    )


def test_no_import_leaves_the_path_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = list(sys.path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    import_modules(())
    import_modules(["json"])
    assert sys.path[: len(before)] == before


@pytest.fixture
def longest(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The limit on an expression's characters; what was judged by another limit is forgotten, before and after."""
    monkeypatch.setattr(pt2_check, "LONGEST", request.param)
    pt2_check._expression.cache_clear()
    yield request.param
    pt2_check._expression.cache_clear()


@pytest.mark.sample(1)
@pytest.mark.parametrize("longest", [pt2_check.LONGEST, 10], indirect=True)
def test_saving_says_what_is_only_read_on_trust(longest: int, tmp_path: Path) -> None:
    rows = {"x": {0: torch.export.Dim.DYNAMIC}, "shift": None}
    program = tpcompiler.parallelize(
        torch.export.export(Mlp(), tuple(mlp_inputs().values()), dynamic_shapes=rows), 2, PLAN
    )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        program.save(tmp_path / "out")
    ours = [str(each.message) for each in said if issubclass(each.category, tpcompiler.TpCompilerWarning)]
    if longest == 10:
        (warning,) = ours
        assert warning.startswith("these files are only read with trust=True: its entry models/")
        with pytest.raises(tpcompiler.TpCompilerError, match="is not a plain expression"):
            read_model(tmp_path / "out" / "rank_0.pt2")
    else:
        assert not ours
        read_model(tmp_path / "out" / "rank_0.pt2")
