"""Files that would run code: each is refused, and runs its code where it is trusted. How they are made: poisons.py."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

import tpcompiler
from tests.runtime.commands import call, refused, right
from tests.runtime.endless import ARGUMENTS, ENDLESS, origin_that_opens_a_library, size_in_many_places, texts_far_below
from tests.runtime.models import PLAN, PLAN_TEXT, export_mlp, mlp_inputs
from tests.runtime.poisons import (
    ARGS,
    EXAMPLES,
    POISONS,
    Entries,
    entries_of,
    key_of_an_example,
    pickled_examples,
    refusal,
    save_victim,
    write_entries,
)
from tpcompiler.errors import ArtifactError
from tpcompiler.runtime.artifact import FORMAT, MANIFEST, SET, SINGLE, read_manifest, sha256
from tpcompiler.runtime.model_file import read_model
from tpcompiler.runtime.program_files import ProgramFiles

TRUST = "if you trust who made the file, pass trust=True"


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("clean") / "model.pt2"
    save_victim(path)
    return path


@pytest.fixture(autouse=True)
def poison_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module that python finds, and that writes the marker when it is imported."""
    (tmp_path / "poison_module.py").write_text(
        f"import enum\nKind = enum.Enum('Kind', 'A')\nlist = list\nopen({str(tmp_path / 'marker')!r}, 'w').close()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("poison_module", None)


def test_what_torch_writes_is_read_without_trust(clean: Path) -> None:
    program = read_model(clean)
    assert program.example_inputs is not None
    expected = torch.export.load(clean).module()(*ARGS)["y"]
    assert torch.equal(program.module()(*ARGS)["y"], expected)


@pytest.mark.parametrize(("poison", "fires", "said"), POISONS, ids=[poison.__name__ for poison, _, _ in POISONS])
def test_a_poisoned_file_runs_nothing(
    poison: Callable[[Entries, Path], None], fires: bool, said: str, clean: Path, tmp_path: Path
) -> None:
    entries, path, marker = entries_of(clean), tmp_path / "poisoned.pt2", tmp_path / "marker"
    poison(entries, marker)
    write_entries(path, entries)
    message = refusal(path)
    assert message.startswith(f"{path} is not read: its entry {said}")
    assert message.endswith(TRUST)
    assert not marker.exists()
    with contextlib.suppress(Exception):  # by then the code has run
        program = torch.export.load(path)
        module = program.module()
        with contextlib.suppress(Exception):
            module(*ARGS)
        assert program.example_inputs is not None
        module(*program.example_inputs[0])
    assert marker.exists() == fires


def test_a_key_of_the_examples_is_one_of_the_arguments(clean: Path, tmp_path: Path) -> None:
    """torch writes it into the source of the input checks."""
    entries, path, marker = entries_of(clean), tmp_path / "poisoned.pt2", tmp_path / "marker"
    key_of_an_example(entries, marker)
    write_entries(path, entries)
    assert refusal(path).startswith(f"{path}: {ARGUMENTS}")
    with contextlib.suppress(Exception):
        torch.export.load(path).module()(*ARGS)
    assert marker.exists()


@pytest.mark.sample(6)
@pytest.mark.sweep(2)
@pytest.mark.timeout(60)
@pytest.mark.parametrize(("poison", "said"), ENDLESS, ids=[poison.__name__ for poison, _ in ENDLESS])
def test_a_file_without_end_is_refused(
    poison: Callable[[Entries, Path], None], said: str, clean: Path, tmp_path: Path
) -> None:
    entries, path = entries_of(clean), tmp_path / "poisoned.pt2"
    poison(entries, tmp_path / "marker")
    write_entries(path, entries)
    assert refusal(path).startswith((f"{path} is not read: its entry {said}", f"{path}: {said}"))


@pytest.mark.sample(1)
@pytest.mark.timeout(60)
@pytest.mark.parametrize("change", [texts_far_below, origin_that_opens_a_library])
def test_texts_that_nothing_is_made_of(change: Callable[[Entries, Path], None], clean: Path, tmp_path: Path) -> None:
    """As many as a file may hold are looked at in the time of reading them, however deep they lie."""
    entries, path = entries_of(clean), tmp_path / "model.pt2"
    change(entries, tmp_path / "marker")
    write_entries(path, entries)
    read_model(path)


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_size_in_many_places_is_read_once(clean: Path, tmp_path: Path) -> None:
    entries, path = entries_of(clean), tmp_path / "model.pt2"
    size_in_many_places(entries, tmp_path / "marker")
    write_entries(path, entries)
    with contextlib.suppress(ArtifactError):  # what torch makes of it is not known
        read_model(path)


@pytest.fixture
def poisoned(tmp_path: Path) -> Path:
    """A model that every command can work with, but for its example inputs."""
    torch.export.save(export_mlp(), tmp_path / "mlp.pt2")
    entries = entries_of(tmp_path / "mlp.pt2")
    pickled_examples(entries, tmp_path / "marker")
    write_entries(tmp_path / "poisoned.pt2", entries)
    return tmp_path / "poisoned.pt2"


def test_trust_on_the_command_line(poisoned: Path, tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(PLAN_TEXT)
    save_file(mlp_inputs(), tmp_path / "in")
    marker, out = tmp_path / "marker", tmp_path / "out"
    said = f"{poisoned} is not read: its entry {EXAMPLES} needs a pickle that may run code (eval)\n  help: "
    said += TRUST.replace("trust=True", "--trust\n")

    def only_on_trust(*words: object, said: str = said) -> None:
        assert refused(*words) == said
        assert not marker.exists()
        right(*words, "--trust")
        assert marker.exists()
        marker.unlink()

    only_on_trust("inspect", poisoned)
    only_on_trust("convert", poisoned, "--tp", 2, "--plan", tmp_path / "plan.yaml", "-o", out)
    only_on_trust("verify", out, "--against", poisoned, "--inputs", tmp_path / "in")
    # Who can write the programs can write their hashes.
    entries = entries_of(out / "program.pt2")
    pickled_examples(entries, marker)
    write_entries(out / "program.pt2", entries)
    assert "has SHA-256" in refused("inspect", out, "--rank", 0)
    manifest = json.loads((out / MANIFEST).read_text())
    manifest["files"]["program.pt2"] = sha256(out / "program.pt2")
    (out / MANIFEST).write_text(json.dumps(manifest))
    said = said.replace(str(poisoned), str(out / "program.pt2"))
    only_on_trust("inspect", out, "--rank", 0, said=said)
    only_on_trust("verify", out, "--against", tmp_path / "mlp.pt2", said=said)
    assert "--trust" in call("run", "--help").stdout


@pytest.mark.slow
def test_load(poisoned: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    tpcompiler.parallelize(export_mlp(), 1, PLAN).save(tmp_path / "out")
    entries = entries_of(tmp_path / "out" / "program.pt2")
    pickled_examples(entries, marker)
    write_entries(tmp_path / "out" / "program.pt2", entries)
    manifest = json.loads((tmp_path / "out" / MANIFEST).read_text())
    manifest["files"]["program.pt2"] = sha256(tmp_path / "out" / "program.pt2")
    (tmp_path / "out" / MANIFEST).write_text(json.dumps(manifest))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ArtifactError, match="is not read: its entry"):
            tpcompiler.load(tmp_path / "out")
        assert not marker.exists()
        with contextlib.suppress(Exception):  # the example inputs are no tensors
            tpcompiler.load(tmp_path / "out", trust=True)
        assert marker.exists()
    finally:
        dist.destroy_process_group()


@dataclasses.dataclass
class Batch:
    x: torch.Tensor


class TakesBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.down(self.up(batch.x))


@pytest.mark.slow
def test_what_is_written_needs_no_trust(tmp_path: Path) -> None:
    """Example inputs of a class are a pickle: the model's file needs trust, the files made of it have no example."""
    torch.export.register_dataclass(Batch, serialized_type_name="toy.Batch")
    program = torch.export.export(TakesBatch(), (Batch(torch.ones(2, 4)),))
    torch.export.save(program, tmp_path / "model.pt2")
    assert f"(tests.runtime.{Path(__file__).stem}.Batch)" in refusal(tmp_path / "model.pt2")
    made = tpcompiler.parallelize(
        read_model(tmp_path / "model.pt2", trust=True), 2, {"up": "colwise", "down": "rowwise"}
    )
    made.save(tmp_path / "out")
    assert made.rank_program(0).example_inputs is not None
    note = "example inputs:\n  the written programs have none: a file could hold these only as a pickle"
    assert note in made.report()
    assert "example inputs:" not in tpcompiler.parallelize(export_mlp(), 2, PLAN).report()
    for rank in range(2):
        assert read_model(tmp_path / "out" / f"rank_{rank}.pt2").example_inputs is None


@pytest.mark.slow
def test_links_that_leave_the_artifact(tmp_path: Path) -> None:
    other, out = tmp_path / "other", tmp_path / "out"
    for directory in (other, out):
        tpcompiler.parallelize(export_mlp(), 1, PLAN).save(directory)
    manifest = read_manifest(out)
    (out / "program.pt2").rename(out / "kept.pt2")
    (out / "program.pt2").symlink_to(out / "kept.pt2")
    ProgramFiles(SINGLE, out, manifest).open_program(0)  # a link to beside it
    (out / "program.pt2").unlink()
    (out / "program.pt2").symlink_to(other / "program.pt2")
    with pytest.raises(ArtifactError) as raised:
        ProgramFiles(SINGLE, out, manifest).open_program(0)
    assert str(raised.value) == (
        f"{out / 'program.pt2'} leads out of {out}\n  help: copy the files themselves, not links"
    )
    (out / MANIFEST).unlink()
    (out / MANIFEST).symlink_to(other / MANIFEST)
    with pytest.raises(ArtifactError, match=f"^{out / MANIFEST} leads out of {out}\n"):
        read_manifest(out)
    (tmp_path / "link").symlink_to(other)
    assert read_manifest(tmp_path / "link").world_size == 1  # where the artifact itself lies is the user's affair


@pytest.mark.parametrize("name", ["..", "../other", "/etc", ".", "", "a/b"])
def test_programs_of_strange_names(name: str, tmp_path: Path) -> None:
    (tmp_path / SET).write_text(json.dumps({"format": FORMAT, "programs": [name]}))
    with pytest.raises(ArtifactError, match=r"is damaged at \$.programs\[0\]: expected str matching regex"):
        tpcompiler.load(tmp_path)


def test_a_program_that_is_a_link(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / SET).write_text(json.dumps({"format": FORMAT, "programs": ["decode"]}))
    (tmp_path / "set" / "decode").symlink_to(tmp_path)
    with pytest.raises(ArtifactError, match=f"^{tmp_path / 'set' / 'decode'} leads out of {tmp_path / 'set'}\n"):
        tpcompiler.load(tmp_path / "set")
