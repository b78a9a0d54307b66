"""Names that torch's Python does not keep apart: what it makes of them is wrong, and no judge of the graph sees it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim, export

import tpcompiler
from tests.runtime.poisons import entries_of, write_entries
from tpcompiler.errors import ArtifactError, ProgramError
from tpcompiler.runtime.artifact import MANIFEST, sha256
from tpcompiler.runtime.python_names import find_unsafe_name

PLAN = {"up": "colwise", "down": "rowwise"}
X, Y = (torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(2))


def model_of(first: str, second: str, made: str, base: type[nn.Module] = nn.Module) -> nn.Module:
    """A module whose forward takes arguments of these names; `made` says what it makes of them and of `h`."""
    source = f"def forward(self, {first}, {second}):\n h = self.down(self.up({first}).relu())\n return {made}"
    names: dict[str, Any] = {"torch_": torch}
    exec(source, names)
    model = type("Named", (base,), {"forward": names["forward"]})()
    model.up, model.down = nn.Linear(8, 16), nn.Linear(16, 8)
    return model  # type: ignore[no-any-return]


UNSAFE = [
    ("input", "input_1", "h - input_1", "torch's Python takes the input 'input_1' for the input 'input'"),
    ("max", "max_1", "h - max_1", "torch's Python takes the input 'max_1' for the input 'max'"),
    ("x", "torch", "h - torch", "the input 'torch' hides what torch's Python means by 'torch'"),
    ("x", "device", "h - device + torch_.zeros(8, device='cpu')", "the input 'device' hides what torch's Python means"),
    (
        "x",
        "inf",
        "h.masked_fill(h > 0, float('inf')) + inf",
        "the input 'inf' hides what torch's Python means by 'inf'",
    ),
    (
        "x",
        "nan",
        "h.masked_fill(h > 0, float('nan')) + nan",
        "the input 'nan' hides what torch's Python means by 'nan'",
    ),
]


@pytest.mark.parametrize(("first", "second", "made", "said"), UNSAFE)
def test_inputs_that_torch_takes_for_others_are_refused(first: str, second: str, made: str, said: str) -> None:
    model = model_of(first, second, made)
    exported = export(model, (X, Y))
    try:
        right = torch.allclose(exported.module()(X, Y), model(X, Y), equal_nan=True)
    except (AttributeError, TypeError, RuntimeError):
        right = False
    assert not right  # there is something to refuse
    with pytest.raises(ProgramError, match=said):
        tpcompiler.parallelize(exported, 2, PLAN)


@pytest.mark.parametrize(
    ("first", "second", "made"),
    [
        ("input_1", "input", "h - input"),
        ("input", "max_1", "h - max_1"),
        ("x", "x_1", "h - x_1"),
        ("x", "device", "h - device"),
        ("x", "inf", "h - inf"),
        ("x", "up_weight", "h - up_weight"),
        ("x", "_guards_fn", "h - _guards_fn"),
    ],
)
def test_other_inputs_are_taken(first: str, second: str, made: str) -> None:
    model = model_of(first, second, made)
    exported = export(model, (X, Y))
    tpcompiler.parallelize(exported, 2, PLAN)
    assert torch.equal(exported.module()(X, Y), model(X, Y))


@pytest.mark.parametrize("keys", [["\xb5", "\u03bc"], ["cafe\u0301"]])
def test_modules_that_python_takes_for_one_another_are_refused(keys: list[str]) -> None:
    layers = nn.Sequential()
    for key in keys:
        layers.add_module(key, nn.Linear(8, 8))
    exported = export(layers, (X,))
    with pytest.raises(ProgramError, match=r"which Python reads as '(\\u03bc|caf\\xe9)'"):
        tpcompiler.parallelize(exported, 2, {"*": "replicate"})


def test_a_composed_letter_is_a_name() -> None:
    layers = nn.Sequential()
    layers.add_module("caf\xe9", nn.Linear(8, 8))
    assert tpcompiler.parallelize(export(layers, (X,)), 2, {"caf\xe9": "replicate"}).verify((X,)).ok


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.down(self.up(x).relu()) * torch.tensor([0.0, 1, 2, 3, 4, 5, 6, 7]) + y
        made: torch.Tensor = torch.cond(h.sum() > 0, lambda h: h.sin(), lambda h: h.cos(), (h,))
        return made


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("names") / "out"
    exported = export(Branches(), (X, Y), dynamic_shapes=({0: Dim("rows")}, {0: Dim("rows")}))
    tpcompiler.parallelize(exported, 2, PLAN).save(directory)
    return directory


def renamed(value: Any, old: str, new: str) -> Any:
    if isinstance(value, dict):
        return {renamed(k, old, new): renamed(v, old, new) for k, v in value.items()}
    if isinstance(value, list):
        return [renamed(each, old, new) for each in value]
    return new if value == old else value


def rewrite(directory: Path, out: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Copy the artifact with every rank's program changed, and its hashes."""
    shutil.copytree(directory, out)
    manifest = json.loads((out / MANIFEST).read_text())
    for name in manifest["files"]:
        entries = entries_of(out / name)
        entries["models/model.json"] = json.dumps(change(json.loads(entries["models/model.json"]))).encode()
        write_entries(out / name, entries)
        manifest["files"][name] = sha256(out / name)
    (out / MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("old", "new", "read"),
    [
        ("y", "\uff44own_bias", "down_bias"),  # the variable of a weight
        ("false_graph_0", "\uff54rue_graph_0", "true_graph_0"),
    ],
)
def test_names_in_a_file_that_python_takes_for_others(
    old: str, new: str, read: str, artifact: Path, tmp_path: Path
) -> None:
    rewrite(artifact, tmp_path / "out", lambda data: renamed(data, old, new))
    with pytest.raises(ArtifactError, match=f"which Python reads as '{read}'"):
        tpcompiler.check(tmp_path / "out")


def test_a_tensor_in_the_weights_and_in_the_constants() -> None:
    """torch takes the one, and who reads the state first the other."""
    exported = export(Branches(), (X, Y))
    assert not find_unsafe_name(exported)
    name, value = next(iter(exported.constants.items()))
    exported.state_dict[name] = value + 1
    with pytest.raises(ProgramError, match="is in the state and in the constants"):
        tpcompiler.parallelize(exported, 2, PLAN)
