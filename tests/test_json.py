"""What every command prints with --json is what docs/json.md says of it, field by field."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.checkpoint.test_export import FACTORY
from tests.launch import fork_ranks
from tests.runtime.commands import call
from tests.runtime.models import PLAN_TEXT, export_mlp, mlp_inputs
from tests.test_calibrate import link_of, measured_as
from tpcompiler import cli

MACHINE = "ideal"  # as if latencies were none: small models are worth cutting

PAGE = Path(__file__).parents[1] / "docs" / "json.md"
PLAIN = {"text": str, "integer": int, "number": (int, float), "boolean": bool, "any": object}
SLOW = {
    "package",
    "run",
    "generate",
    "output",
    "counted",
}  # in tests of their own, such as tests/runtime/test_package.py

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="an installed wheel has no docs beside the tests")


class Field(NamedTuple):
    type: str
    is_optional: bool


def sections() -> dict[str, dict[str, Field]]:
    """Of every command, and of every object that they print."""
    _, *parts = re.split(r"^###? (\w+)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    row = re.compile(r"^\| `(\w+)(\??)` \| ([\w ]+) \|", re.MULTILINE)
    return {
        name: {field: Field(said, optional == "?") for field, optional, said in row.findall(text)}
        for name, text in zip(parts[::2], parts[1::2], strict=True)
        if row.search(text)
    }


def wrong(value: Any, said: str, at: str, seen: set[str]) -> Iterator[str]:
    """Where a value is not what is said; `seen` grows by the objects that it has."""
    if said.endswith(" or null"):
        yield from () if value is None else wrong(value, said.removesuffix(" or null"), at, seen)
    elif match := re.fullmatch("(list|map) of (.*)", said):
        kind = list if match[1] == "list" else dict
        if not isinstance(value, kind):
            yield f"{at} is {value!r}, and no {match[1]}"
            return
        each = enumerate(value) if kind is list else value.items()
        yield from (found for key, part in each for found in wrong(part, match[2], f"{at}[{key!r}]", seen))
    elif " or " in said:
        if not any(isinstance(value, PLAIN[one]) for one in said.split(" or ")):
            yield f"{at} is {value!r}, and not {said}"
    elif said in PLAIN:
        if not isinstance(value, PLAIN[said]) or (isinstance(value, bool) and said in ("integer", "number")):
            yield f"{at} is {value!r}, and not {said}"
    else:
        seen.add(said)
        fields = sections()[said]
        if not isinstance(value, dict):
            yield f"{at} is {value!r}, and no {said}"
            return
        yield from (f"{at}.{name} is not on the page" for name in value.keys() - fields.keys())
        yield from (f"{at}.{name} is missing" for name in fields.keys() - value.keys() if not fields[name].is_optional)
        for name in fields.keys() & value.keys():
            yield from wrong(value[name], fields[name].type, f"{at}.{name}", seen)


class Gathered(nn.Module):
    """A fallback, and dynamic sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).cumsum(-1))


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
        text = json.dumps(measured_as([link_of("all_reduce", 2)], host={"operation": 1e-6, "collective": 1e-5}))
        Path(launch[-1], "measured.json").write_text(text)

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
        run("doctor", "dynamic.pt2", "--input", "x=S(0)")
        run("plan", "model.pt2", "--tp", 2, "-o", "found.yaml")
        run("calibrate", "-o", "here.yaml")
        run("convert", "model.pt2", "--tp", 2, "--plan", "plan.yaml", "-o", "out")
        run("convert", "dynamic.pt2", "--tp", 2, "--plan", "gathered.yaml", "-o", "dynamic")
        run("convert", "model.pt2", "other.pt2", "--tp", 2, "--plan", "plan.yaml", "--dry-run")
        run("inspect", "out")
        run("verify", "out", "--against", "model.pt2")
        run("check", "out")
        run("show", "out")
        run("explain", "out", "linear_1")
        run("explain", "out", "layers.0.up.weight")
        run("reshard", "out", "--tp", 4, "-o", "out4")
        Path("head.yaml").write_text(f"{PLAN_TEXT}head: colwise_gather_output\n")
        run("convert", "model.pt2", "--tp", 2, "--plan", "head.yaml", "-o", "head")
        run("diff", "out", "head")
        run("cost", "dynamic", "--at", "batch=6")
        run("merge", "out", "--safetensors", "-o", "weights.safetensors")
        run("export", "models_for_json:build", "-o", "hollow.pt2")
        run("convert", "hollow.pt2", "--tp", 2, "--plan", "gathered.yaml", "-o", "hollow")
        tensors = {"up.weight": (12, 8), "up.bias": (12,), "down.weight": (8, 12), "down.bias": (8,)}
        save_file({name: torch.ones(shape) for name, shape in tensors.items()}, "hollow.safetensors")
        run("cut", "hollow", "--checkpoint", "hollow.safetensors", "--ranks", "0,1")
    return found


def as_said(command: str, value: Any) -> tuple[Any, str]:
    """What the page describes in other words than as a table: one artifact by itself."""
    if command == "convert" and "programs" not in value:
        out, *rest = value.items()
        return dict([out, ("programs", {"": dict(rest)})]), "convert"
    return value, "artifact" if value.get("kind") == "artifact" else command


def test_every_command_is_on_the_page() -> None:
    commands = {
        command.name or command.callback.__name__ for command in cli.app.registered_commands if command.callback
    }
    assert commands <= sections().keys()
    for command in commands:
        assert "--json" in call(command, "--help").stdout, command


def test_all_that_is_printed_is_as_the_page_says(printed: dict[str, list[Any]]) -> None:
    seen: set[str] = set()
    values = [as_said(command, value) for command, each in printed.items() for value in each]
    found = [one for value, said in values for one in wrong(value, said, said, seen)]
    assert not found, "\n".join(found)
    assert seen == sections().keys() - SLOW


def test_what_differs_is_noticed() -> None:
    good = {"kind": "all_reduce", "why": "inherent", "count": 2, "payload_bytes": 4, "wire_bytes": 4}
    assert not list(wrong(good, "traffic", "it", set()))
    assert list(wrong({**good, "count": 2.5}, "traffic", "it", set())) == ["it.count is 2.5, and not integer"]
    assert list(wrong({**good, "count": True}, "traffic", "it", set())) == ["it.count is True, and not integer"]
    assert list(wrong({**good, "more": 1}, "traffic", "it", set())) == ["it.more is not on the page"]
    del good["why"]
    assert list(wrong(good, "traffic", "it", set())) == ["it.why is missing"]


@pytest.mark.slow
def test_what_ranks_print(tmp_path: Path) -> None:
    torch.export.save(export_mlp(), tmp_path / "model.pt2")
    (tmp_path / "plan.yaml").write_text(PLAN_TEXT)
    words = "convert", tmp_path / "model.pt2", "--tp", 2, "--plan", tmp_path / "plan.yaml", "-o", tmp_path / "out"
    assert call(*words).exit_code == 0
    seen: set[str] = set()
    save_file(mlp_inputs(), tmp_path / "in.safetensors")
    inputs = "run", tmp_path / "out", "--inputs", tmp_path / "in.safetensors", "--count", "--json"
    ended = fork_ranks(2, Path(cli.__file__).with_name("__main__.py"), *inputs)
    assert ended.codes == (0, 0), ended.printed
    assert not list(wrong(json.loads(ended.printed[0]), "run", "run", seen))
    assert seen >= {"output", "counted"}
