"""Every command's --json answer is of its type, and the page describes every type."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.checkpoint.test_export import FACTORY
from tests.launch import fork_ranks
from tests.runtime.commands import call
from tests.runtime.models import PLAN_TEXT, export_mlp, mlp_inputs
from tests.test_calibrate import link_of, measured_as
from tools.json_page import ANSWERS, page, read_schema, schema_text
from tpcompiler import cli, export_training

MACHINE = "ideal"  # as if latencies were none: small models are worth cutting

SLOW = {
    "WrittenPackage",
    "Returned",
    "ReturnedTensor",
    "CountedCollectives",
    "GeneratedTokens",
}  # in tests of their own


def read(command: str, value: Any) -> Any:
    """Return an answer as the first of its command's types that it can be read as."""
    value, errors = finite(value), []
    for kind in ANSWERS[command]:
        try:
            found = msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            errors.append(str(error))
            continue
        assert json.loads(msgspec.json.encode(found)) == value, "all fields, and no other ones"
        return found
    raise AssertionError(f"{command}: {errors}")


def finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return list(map(finite, value))
    return 1.0 if value in ("inf", "-inf", "nan") else value


def kinds_in(value: Any) -> Iterator[str]:
    """The names of the types of all objects in an answer."""
    if isinstance(value, (list, tuple)):
        yield from (kind for each in value for kind in kinds_in(each))
    elif isinstance(value, dict):
        yield from kinds_in(list(value.values()))
    elif names := getattr(value, "__struct_fields__", None) or getattr(value, "__dataclass_fields__", None):
        yield type(value).__name__
        yield from kinds_in([getattr(value, name) for name in names])


class Gathered(nn.Module):
    """A fallback, and dynamic sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).sort(-1).values)


class Counted(nn.Module):
    """A state that each call writes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total.add_(x.sum(0))
        return x * self.total


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What the commands print of small models, by command."""
    folder = tmp_path_factory.mktemp("json")
    found: dict[str, list[Any]] = {}

    def run(command: str, *words: object) -> None:
        result = call(command, *words, "--json")
        assert result.exit_code in (0, 1), result.stderr
        found.setdefault(command, []).append(json.loads(result.stdout))

    def measured(launch: Sequence[str], *_: object, **__: object) -> None:
        host, rows = {"operation": 1e-6, "collective": 1e-5}, [{"rows": 1, "share": 0.25}]
        measurements = measured_as([link_of("all_reduce", 2)], host=host, cache_bandwidth=3e10, rows=rows)
        Path(launch[-1], "measured.json").write_bytes(msgspec.json.encode(measurements))

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        patch.setattr("tpcompiler.api.calibrate.run_ranks", measured)
        Path("plan.yaml").write_text(PLAN_TEXT)
        Path("models_for_json.py").write_text(FACTORY)
        torch.export.save(export_mlp(), "model.pt2")
        rows = {0: torch.export.Dim("rows", min=2, max=6)}
        dynamic = torch.export.export(Gathered(), (torch.randn(4, 8),), dynamic_shapes=(rows,))
        torch.export.save(dynamic, "dynamic.pt2")
        Path("gathered.yaml").write_text("up: colwise\ndown: rowwise\n")
        run("inspect", "model.pt2")
        Path("other.pt2").write_bytes(Path("model.pt2").read_bytes())
        run("plan", "dynamic.pt2", "--input", "x=S(0)")
        run("plan", "model.pt2", "--tp", 2, "-o", "found.yaml")
        run("plan", "model.pt2", "--devices", "24GB,12GB")
        run("calibrate", "-o", "here.yaml")
        run("convert", "model.pt2", "--tp", 2, "--plan", "plan.yaml", "-o", "out")
        run("convert", "dynamic.pt2", "--tp", 2, "--plan", "gathered.yaml", "-o", "dynamic")
        Path("few.yaml").write_text("head: colwise_gather_output\n")
        run("convert", "model.pt2", "--tp", 2, "--plan", "few.yaml", "--dry-run")
        run("convert", "model.pt2", "other.pt2", "--tp", 2, "--plan", "plan.yaml", "--dry-run")
        torch.export.save(torch.export.export(Counted(), (torch.ones(2, 4),)), "counted.pt2")
        run("convert", "counted.pt2", "--tp", 2, "--plan", "auto", "-o", "counted")
        run("handover", "counted", "counted", "-o", "handover.json")
        run("inspect", "out")
        run("verify", "out", "--against", "model.pt2")
        run("check", "out")
        run("inspect", "out", "--rank", 0)
        run("explain", "out", "linear_1")
        run("explain", "out", "layers.0.up.weight")
        run("reshard", "out", "--tp", 4, "-o", "out4")
        Path("head.yaml").write_text(f"{PLAN_TEXT}head: colwise_gather_output\n")
        run("convert", "model.pt2", "--tp", 2, "--plan", "head.yaml", "-o", "head")
        run("diff", "out", "head")
        run("explain", "dynamic", "--at", "batch=6")
        run("explain", "dynamic", "all_gather")
        run("reshard", "out", "--safetensors", "-o", "weights.safetensors")
        run("export", "models_for_json:build", "-o", "hollow.pt2")
        run("convert", "hollow.pt2", "--tp", 2, "--plan", "gathered.yaml", "-o", "hollow")
        loss = {"loss": torch.nn.functional.mse_loss, "targets": {"target": torch.randn(2, 8)}}
        trained = export_training(torch.nn.Linear(8, 8), (torch.randn(2, 8),), **loss)  # type: ignore[arg-type]
        torch.export.save(trained, "trained.pt2")
        run("convert", "trained.pt2", "--tp", 2, "--plan", "auto", "--dry-run")
        tensors = {"up.weight": (12, 8), "up.bias": (12,), "down.weight": (8, 12), "down.bias": (8,)}
        save_file({name: torch.ones(shape) for name, shape in tensors.items()}, "hollow.safetensors")
        run("cut", "hollow", "--checkpoint", "hollow.safetensors", "--ranks", "0,1")
    return found


def test_every_command_is_on_the_page() -> None:
    commands = {
        command.name or command.callback.__name__ for command in cli.app.registered_commands if command.callback
    }
    assert commands == ANSWERS.keys()
    for command in commands:
        assert "--json" in call(command, "--help").stdout, command


@pytest.mark.slow
def test_all_that_is_printed_is_of_its_type(printed: dict[str, list[Any]]) -> None:
    answers = [read(command, value) for command, values in printed.items() for value in values]
    assert set(kinds_in(answers)) == read_schema()[1].keys() - SLOW


@pytest.mark.slow
def test_what_differs_is_noticed(printed: dict[str, list[Any]]) -> None:
    (good,) = [each for each in printed["explain"] if "formula" in each]
    assert read("explain", good)
    for change, text in (
        ({"wire_bytes": 2.5}, "Expected `int`, got `float` - at `$.wire_bytes`"),
        ({"wire_bytes": True}, "Expected `int`, got `bool` - at `$.wire_bytes`"),
        ({"more": 1}, "Object contains unknown field `more`"),
    ):
        with pytest.raises(AssertionError, match=re.escape(text)):
            read("explain", {**good, **change})
    del good["sizes"]
    with pytest.raises(AssertionError, match="missing required field `sizes`"):
        read("explain", good)


@pytest.mark.slow
def test_the_page_and_the_schema_have_every_object() -> None:
    text, schema = page(), json.loads(schema_text())
    for name, described in schema["$defs"].items():
        assert f"{described['description']}\n\n| field" in text, name


@pytest.mark.slow
def test_what_ranks_print(tmp_path: Path) -> None:
    torch.export.save(export_mlp(), tmp_path / "model.pt2")
    (tmp_path / "plan.yaml").write_text(PLAN_TEXT)
    words = "convert", tmp_path / "model.pt2", "--tp", 2, "--plan", tmp_path / "plan.yaml", "-o", tmp_path / "out"
    assert call(*words).exit_code == 0
    save_file(mlp_inputs(), tmp_path / "in.safetensors")
    inputs = "run", tmp_path / "out", "--inputs", tmp_path / "in.safetensors", "--count", "--json"
    ended = fork_ranks(2, Path(cli.__file__).with_name("__main__.py"), *inputs)
    assert ended.codes == (0, 0), ended.printed
    assert {"ReturnedTensor", "CountedCollectives"} <= set(kinds_in(read("run", json.loads(ended.printed[0]))))
