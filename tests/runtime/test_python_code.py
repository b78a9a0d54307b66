"""Programs of which torch's Python computes something else than the graph, which is what the judges read."""

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
from tpcompiler.runtime.python_code import find_difference

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
    ("input", "input_1", "h - input_1", "'input_1' has the name that torch gives to another one"),
    ("max", "max_1", "h - max_1", "'max_1' has the name that torch gives to another one"),
    ("x", "torch", "h - torch", "'torch' hides"),
    ("x", "device", "h - device + torch_.zeros(8, device='cpu')", "'device' hides"),
    ("x", "inf", "h.masked_fill(h > 0, float('inf')) + inf", "'inf' hides"),
    ("x", "nan", "h.masked_fill(h > 0, float('nan')) + nan", "'nan' hides"),
    ("x", "infj", "(h * complex(0, float('inf'))).real + infj", "takes the number infj"),
]


@pytest.mark.sample(5)
@pytest.mark.parametrize(("first", "second", "made", "said"), UNSAFE)
def test_inputs_that_torch_takes_for_others_are_refused(first: str, second: str, made: str, said: str) -> None:
    model = model_of(first, second, made)
    exported = export(model, (X, Y))
    try:
        right = torch.allclose(exported.module()(X, Y), model(X, Y), equal_nan=True)
    except (AttributeError, TypeError, RuntimeError):
        right = False
    if second == "infj" and right:
        pytest.skip("this torch writes the number in another way")
    assert not right  # there is something to refuse
    with pytest.raises(ProgramError, match=said):
        tpcompiler.parallelize(exported, 2, PLAN)


def test_a_power_of_a_negative_number_is_refused() -> None:
    """Python reads `-1 ** n` as `-(1 ** n)`."""
    model = model_of("x", "y", "h * (-1) ** x.shape[0] + y")
    exported = export(model, (X, Y), dynamic_shapes=({0: Dim("rows")}, {0: Dim("rows")}))
    assert not torch.allclose(exported.module()(X, Y), model(X, Y))
    with pytest.raises(ProgramError, match=r"'pow_1' is -1 \*\* n, which Python reads as"):
        tpcompiler.parallelize(exported, 2, PLAN)


@pytest.mark.parametrize("keys", [["\xb5", "\u03bc"], ["cafe\u0301"]])
def test_modules_that_python_takes_for_one_another_are_refused(keys: list[str]) -> None:
    layers = nn.Sequential()
    for key in keys:
        layers.add_module(key, nn.Linear(8, 8))
    exported = export(layers, (X,))
    with pytest.raises(ProgramError, match=r"of a module or weight is '(\u03bc|caf\xe9)' to Python"):
        tpcompiler.parallelize(exported, 2, {"*": "replicate"})


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"y": "\uff44own_bias"}, "the argument '\uff44own_bias' hides"),  # for Python the variable of a weight
        ({"false_graph_0": "\uff54rue_graph_0"}, "the body '\uff54rue_graph_0' by another"),
        ({"sum_1": "self"}, "the name 'self' of a value"),
        ({"true_graph_0": "_guards_fn"}, "torch replaces the body '_guards_fn' by another module"),
    ],
)
def test_names_in_a_file_that_python_takes_for_others(
    changes: dict[str, str], said: str, artifact: Path, tmp_path: Path
) -> None:
    def change(data: Any) -> Any:
        for old, new in changes.items():
            assert f'"{old}"' in json.dumps(data)
            data = renamed(data, old, new)
        return data

    rewrite(artifact, tmp_path / "out", change)
    with pytest.raises(ArtifactError, match=said):
        tpcompiler.open(tmp_path / "out").check()


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("a", "b"), ""),
        (("max", "max_1"), "'max_1' has the name"),
        (("a", "torch"), "'torch' hides"),
        (("a", "inf"), "'inf' hides"),
        (("a", "self"), "duplicate argument 'self'"),
    ],
)
def test_operands_of_a_branch_are_arguments_too(names: tuple[str, str], said: str) -> None:
    class Branching(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 0, lambda a, b: (a - b).clamp(max=float("inf")), lambda a, b: a.cos(), (x, y))

    exported = export(Branching(), (X, Y))
    branch = exported.graph_module.true_graph_0
    assert isinstance(branch, torch.fx.GraphModule)
    for node, name in zip(branch.graph.find_nodes(op="placeholder"), names, strict=True):
        node._rename(name)
        node.target = name
    if said.startswith("dupl"):
        with pytest.raises(SyntaxError, match=said):
            branch.recompile()
        return
    branch.recompile()
    assert said in find_difference(exported) if said else not find_difference(exported)


class Keywords(nn.Module):
    def forward(self, x: torch.Tensor, *, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return x * a - b


def test_arguments_in_the_order_of_others() -> None:
    exported = export(Keywords(), (X,), {"a": X, "b": Y})
    assert not find_difference(exported)
    signature = exported.module_call_graph[0].signature
    assert signature is not None
    signature.forward_arg_names = ["x", "b", "a"]
    assert not torch.allclose(exported.module()(X, a=X, b=Y), X * X - Y)
    assert "it names them b, a" in find_difference(exported)


class TwoCalls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.add_module("up@1", nn.Linear(8, 8))
        self.up = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = getattr(self, "up@1")(x) - 2 * self.up(x)
        return made


def test_a_module_that_torch_takes_for_another_call_of_one() -> None:
    model = TwoCalls()
    exported = export(model, (X,))
    assert not torch.allclose(exported.module()(X), model(X))
    with pytest.raises(ProgramError, match=r"torch puts another tensor in the place of 'up@1\.weight'"):
        tpcompiler.parallelize(exported, 2, {"up": "colwise"})


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("cache", torch.zeros(4, 8))

    def forward(self, cache: torch.Tensor) -> torch.Tensor:
        cache.add_(1)
        made: torch.Tensor = self.down(self.up(cache)) + self.cache
        return made


class WrittenBuffer(Cached):
    def forward(self, cache: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.down(self.up(cache))
        self.cache.add_(made)
        return made


def test_a_buffer_that_is_written_and_has_the_name_of_an_input() -> None:
    exported = export(WrittenBuffer(), (X.clone(),))
    with pytest.raises(ProgramError, match="'cache' is written, and names both"):
        tpcompiler.parallelize(exported, 2, PLAN)


def test_an_input_that_is_written_and_has_the_name_of_a_buffer() -> None:
    exported = export(Cached(), (X.clone(),))
    with pytest.raises(ProgramError, match="'cache' is written, and names both"):
        tpcompiler.parallelize(exported, 2, PLAN)


def test_a_tensor_in_the_weights_and_in_the_constants() -> None:
    """torch takes the one, and who reads the state first the other."""
    exported = export(Branches(), (X, Y))
    assert not find_difference(exported)
    name, value = next(iter(exported.constants.items()))
    exported.state_dict[name] = value + 1
    with pytest.raises(ProgramError, match="is in the state and in the constants"):
        tpcompiler.parallelize(exported, 2, PLAN)
