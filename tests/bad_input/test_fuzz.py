"""Plans, manifests and command lines that nobody thought of: an error of our own or none, and nothing half-written."""

from __future__ import annotations

import contextlib
import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.long import LONG
from tests.runtime.models import PLAN, export_mlp
from tpcompiler import Plan, parallelize
from tpcompiler.cli import app
from tpcompiler.cost.machine_file import read_machine
from tpcompiler.errors import ArtifactError, MachineError, TpCompilerError
from tpcompiler.runtime.artifact import read_manifest

TIMES = 20.0 if os.environ.get(LONG) else 0.5


def examples(number: int) -> settings:
    """The same ones in every run, more of them in a long one; a command's time says nothing."""
    quiet = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
    return settings(max_examples=int(number * TIMES), derandomize=True, deadline=None, suppress_health_check=quiet)


WORDS = [
    "colwise",
    "rowwise",
    "R",
    "S(0)",
    "S(-1)",
    "S(9)",
    "P(sum)",
    "packed_colwise:2",
    "[]",
    "{}",
    "null",
    "tp",
    "dp",
]
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=12), st.sampled_from([*WORDS, "layers.*.up"])
)
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
)


@pytest.mark.slow
@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode) | JSON.map(lambda v: json.dumps(v).encode()))
@examples(200)
def test_machines(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    machine = tmp_path_factory.getbasetemp() / "machine.yaml"
    good = b"flops: 1.0e+15\nmemory_bandwidth: 3.0e+12\nmemory: 8.0e+10\nlinks: [{latency: 0.0, bandwidth: 4.0e+11}, "
    for text in (content, good + content + b"]", good.replace(b"3.0e+12", content) + b"]"):
        machine.write_bytes(text)
        with contextlib.suppress(MachineError):
            read_machine(machine)


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode) | JSON.map(lambda v: json.dumps(v).encode()))
@examples(200)
def test_plan_files(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "plan.yaml"
    path.write_bytes(content)
    with contextlib.suppress(TpCompilerError):
        Plan.of(path)


@pytest.mark.slow
@given(
    st.dictionaries(st.sampled_from([*PLAN, "**", "head", "head.weight", "x"]) | st.text(max_size=8), JSON, max_size=3)
)
@examples(60)
def test_plans_of_a_program(plan: dict[str, Any]) -> None:
    with contextlib.suppress(TpCompilerError):
        parallelize(PROGRAM, {"dp": 1, "tp": 2}, plan)


PROGRAM = export_mlp()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("fuzz") / "out"
    parallelize(PROGRAM, 2, PLAN).save(directory)
    return directory


@st.composite
def damaged(draw: st.DrawFn, data: Any) -> Any:
    """The data with one value, at any depth, replaced, removed or added, or with another name of the data."""
    good, data = data, copy.deepcopy(data)
    at = data
    while True:
        keys: list[Any] = list(at) if isinstance(at, dict) else list(range(len(at)))
        if not keys:
            return draw(JSON)
        key = draw(st.sampled_from(keys))
        if isinstance(at[key], dict | list) and at[key] and draw(st.integers(0, 3)):
            at = at[key]
            continue
        way = draw(st.sampled_from(["replaced", "removed", "added", "renamed"]))
        if way == "renamed" and isinstance(at[key], str):
            at[key] = draw(st.sampled_from(sorted(_names(good))))
        elif way == "removed":
            del at[key]
        elif way == "replaced" or isinstance(at, list):
            at[key] = draw(JSON)
        else:
            at[draw(st.text(max_size=8))] = draw(JSON)
        return data


def _names(data: Any) -> set[str]:
    """Return every text of plain data."""
    parts = [*data, *data.values()] if isinstance(data, dict) else data if isinstance(data, list) else ()
    return set().union(*map(_names, parts), {data} if isinstance(data, str) else ())


@pytest.mark.slow
@given(st.data())
@examples(120)
def test_manifests(written: Path, tmp_path: Path, data: st.DataObject) -> None:
    """What the reader lets through, every command that reads it can live with."""
    good = json.loads((written / "manifest.json").read_text())
    directory = tmp_path / "out"
    directory.mkdir(exist_ok=True)
    for file in written.glob("*.pt2"):
        if not (directory / file.name).exists():
            (directory / file.name).write_bytes(file.read_bytes())
    (directory / "manifest.json").write_text(json.dumps(data.draw(damaged(good))))
    before = sorted(path.name for path in directory.iterdir())
    try:
        read_manifest(directory)
    except ArtifactError:
        return
    reading = (
        ["inspect"],
        ["inspect", "--rank", "0"],
        ["check", "--budget", "0 fallbacks"],
        ["explain"],
        ["diff", str(written)],
    )
    for words in (*reading, ["explain", "relu"], ["inspect", "--tensor", "head.weight"]):
        ended_well(CliRunner().invoke(app, [words[0], str(directory), *words[1:]]))
    assert sorted(path.name for path in directory.iterdir()) == before


@given(st.binary(max_size=400))
@examples(60)
def test_manifests_of_bytes(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(ArtifactError):
        read_manifest(tmp_path)


COMMANDS = "convert inspect show verify check run explain diff cost plan --tp --mesh --plan -o --input --format --rank --json --dry-run --force"
VALUES = "2 0 -1 dp=2,tp=2 x=S(0) svg out model.pt2 plan.yaml"
ARGUMENT = st.sampled_from([*COMMANDS.split(), *VALUES.split()]) | st.text(
    st.characters(exclude_characters="\0", codec="utf-8"), max_size=8
)


@pytest.mark.slow
@given(st.lists(ARGUMENT, max_size=7))
@examples(150)
def test_command_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.yaml").write_text("up: colwise\n")
    before = sorted(path.name for path in tmp_path.iterdir())
    ended_well(CliRunner().invoke(app, words))
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def ended_well(result: Result) -> None:
    """With an exit code of our own (2: bad input; 1: not equal, not sound) and no traceback."""
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code in (0, 1, 2), result.output
    assert "Traceback" not in result.output
