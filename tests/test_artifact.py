"""The artifact: a program in memory and the same one opened from files give the same answers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from msgspec.structs import replace
from torch.export import Dim, ExportedProgram, export

import tpcompiler
from tests.runtime.models import Block, export_mlp, randomised
from tpcompiler import ArtifactError, ParallelProgram
from tpcompiler.runtime.artifact import Manifest
from tpcompiler.runtime.records import plain_data

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
PLAN = {"layers.*.up": "colwise", "layers.*.down": "rowwise", "head": "colwise"}
ONE = {"up": "colwise", "down": "replicate"}


class Soft(Block):
    """The softmax needs its dim whole, so a plan that cuts `up` has a fallback."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.softmax(self.up(x), -1))


def dynamic() -> ExportedProgram:
    return export(randomised(Soft()), (torch.randn(6, 8),), dynamic_shapes=({0: Dim("batch")},))


def several() -> dict[str, ExportedProgram]:
    model = randomised(Soft())
    return {"prefill": export(model, (torch.randn(6, 8),)), "decode": export(model, (torch.randn(1, 8),))}


@cache
def converted(name: str) -> ParallelProgram:
    if name == "several":
        return tpcompiler.parallelize(several(), 2, ONE)
    if name == "dynamic":
        return tpcompiler.parallelize(dynamic(), {"dp": 2, "tp": 2}, ONE, inputs=[{"dp": "S(0)"}])
    return tpcompiler.parallelize(export_mlp(), 2, PLAN)


def described(manifest: Manifest) -> dict[str, Any]:
    """The manifest, except where and how its files are."""
    return plain_data(replace(manifest, files={}, programs={}, compiled=None))


def each(program: ParallelProgram) -> Iterator[ParallelProgram]:
    yield from program.values()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), [("one", "shared"), ("dynamic", "ranks"), ("several", "ranks")])
def test_a_round_trip_loses_nothing(name: str, layout: Literal["ranks", "shared"], tmp_path: Path) -> None:
    made = converted(name)
    made.save(tmp_path / "out", layout=layout)
    read = tpcompiler.open(tmp_path / "out")
    assert [*read] == [*made]
    assert read.report() == made.report()
    assert ("help: change 'up'" in made.report()) == (name != "one")
    assert repr(read) == repr(made)
    for ours, theirs in zip(each(made), each(read), strict=True):
        assert described(theirs.manifest()) == described(ours.manifest())
        assert theirs.cost() == ours.cost()
        assert theirs.show() == ours.show()
        assert theirs.show("*") == ours.show("*")
        assert theirs.diff(ours).equal
        for value in ("up.weight", "linear", "all_reduce" if name == "one" else "all_gather"):
            value = f"layers.0.{value}" if name == "one" and "." in value else value
            assert theirs.explain(value) == ours.explain(value)
    assert made.verify().ok
    assert read.verify().ok
    assert made.check().ok
    assert read.check().ok


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", ["ranks", "shared"])
@pytest.mark.parametrize("name", ["one", "several"])
def test_opened_files_are_saved_as_they_are(name: str, layout: Literal["ranks", "shared"], tmp_path: Path) -> None:
    converted(name).save(tmp_path / "out", layout=layout)
    tpcompiler.open(tmp_path / "out").save(tmp_path / "copy")
    files, copies = (
        {file.relative_to(folder): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
        for folder in (tmp_path / "out", tmp_path / "copy")
    )
    assert files == copies
    with pytest.raises(ArtifactError, match="has the layout"):
        tpcompiler.open(tmp_path / "out").save(tmp_path / "other", layout="shared" if layout == "ranks" else "ranks")
    assert not (tmp_path / "other").exists()


def test_what_changes_files_needs_files(tmp_path: Path) -> None:
    for change in (lambda made: made.package(), lambda made: made.cut(tmp_path), lambda made: made.load_state_dict({})):
        with pytest.raises(ArtifactError, match="the program is in memory"):
            change(converted("one"))


@pytest.mark.slow
@pytest.mark.skipif(not PAGE.exists(), reason="an installed wheel has no docs next to the tests")
def test_the_example_of_the_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(example, {})
    assert {file.name for file in tmp_path.iterdir()} == {"mlp_tp2", "mlp_tp4", "mlp.pt2"}
