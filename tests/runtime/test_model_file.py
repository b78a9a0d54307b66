"""Reading a .pt2: quietly, and with the modules it needs. What else it refuses is in tests/bad_input/table.py."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import warnings
import zipfile
from collections.abc import Iterator
from functools import partial
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


def test_torch_is_quiet_only_while_it_reads(model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("torch.export")
    before = logger.handlers
    path = tmp_path / "damaged.pt2"
    content = model.read_bytes()
    path.write_bytes(content.replace(b"aten.relu.default", b"mylib.relu.defalt"))
    with pytest.raises(ArtifactError):
        read_model(path)
    assert capfd.readouterr() == ("", "")
    assert logger.handlers is before


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
from tpcompiler.runtime.model_file import read_model
try:
    read_model("model.pt2")
except ArtifactError as error:
    print(error.message)
print(read_model("model.pt2", ["my_ops"]).graph_module.code.count("toy.twice"))
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


@pytest.fixture(scope="session")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose output is a class of transformers."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=40
    )
    torch.manual_seed(0)
    model = transformers.BertModel(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    path = tmp_path_factory.mktemp("bert") / "bert.pt2"
    torch.export.save(torch.export.export(model, (torch.randint(0, 40, (2, 5)),), strict=False), path)
    return path


MINE = """
import torch

class Answer(dict):
    pass

torch.utils._pytree.register_pytree_node(
    Answer, lambda a: (list(a.values()), list(a)), lambda v, k: Answer(zip(k, v)), serialized_type_name="mine.Answer"
)

class Model(torch.nn.Module):
    def forward(self, x):
        return Answer(y=x + 1)
"""


@pytest.mark.slow
def test_an_output_class_that_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    export = """
import sys; sys.path.insert(0, "")
import torch, mine
torch.export.save(torch.export.export(mine.Model(), (torch.ones(2),)), "model.pt2")
"""
    inspect = "from tpcompiler.cli import main; main()"
    run = partial(fork_code, cwd=tmp_path)
    made = run(export)
    assert made.returncode == 0, made.stderr
    refused = run(inspect, "inspect", "model.pt2")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "model.pt2 takes or returns a mine.Answer, a class that is not imported here" in refused.stderr
    assert "help: pass --import mine" in " ".join(refused.stderr.split())
    assert run(inspect, "inspect", "model.pt2", "--import", "mine").returncode == 0


@pytest.mark.slow
def test_output_classes_of_transformers_are_imported(bert: Path, tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(
        '"encoder.layer.*.intermediate.dense": colwise\n"encoder.layer.*.output.dense": rowwise\n'
    )
    code = f"""
import json, sys, torch
from typer.testing import CliRunner
from tpcompiler.cli import app

def call(*words):
    result = CliRunner().invoke(app, words)
    return result.exit_code, result.stdout, result.stderr

bert, plan, out = {str(bert)!r}, {str(tmp_path / "plan.yaml")!r}, {str(tmp_path / "out")!r}
said = [call("inspect", bert), "transformers" in sys.modules]
said += [call("convert", bert, "--tp", "2", "--plan", plan, "-o", out)]
print(json.dumps(said))
"""
    done = fork_code(code)
    assert done.returncode == 0, done.stderr
    inspected, imported, converted = json.loads(done.stdout)
    assert (inspected[0], inspected[2]) == (0, "")
    assert imported
    assert (converted[0], converted[2]) == (0, "")
    # The written programs need torch alone.
    code = f"""
import sys, torch
spec = torch.export.load({str(tmp_path / "out" / "rank_0.pt2")!r}).call_spec.out_spec
print(spec.type.__name__, "transformers" in sys.modules, "tpcompiler" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "dict False False\n", done.stderr


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
