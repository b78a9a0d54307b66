"""A file is opened once: what was looked into is what is read, and a change meanwhile is noticed."""

from __future__ import annotations

import json
import os
import struct
import zipfile
from collections.abc import Callable, Collection
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import tpcompiler
from tests.runtime.commands import refused
from tests.runtime.models import PLAN, export_mlp, mlp_inputs
from tests.runtime.poisons import (
    EXAMPLES,
    MODEL,
    Fire,
    entries_of,
    pickled_examples,
    save_victim,
    saved,
    write_entries,
    zipped,
)
from tpcompiler.errors import ArtifactError
from tpcompiler.runtime.artifact import MANIFEST, sha256
from tpcompiler.runtime.inputs import read_inputs
from tpcompiler.runtime.model_file import read_model
from tpcompiler.runtime.pt2 import Pt2


@pytest.fixture
def clean(tmp_path: Path) -> Path:
    save_victim(tmp_path / "model.pt2")
    return tmp_path / "model.pt2"


@pytest.fixture
def poisoned(clean: Path, tmp_path: Path) -> Path:
    entries = entries_of(clean)
    pickled_examples(entries, tmp_path / "marker")
    write_entries(tmp_path / "poisoned.pt2", entries)
    return tmp_path / "poisoned.pt2"


def renamed(other: Path, path: Path) -> None:
    other.rename(path)


def overwritten(other: Path, path: Path) -> None:
    path.write_bytes(other.read_bytes())


@pytest.mark.parametrize("swap", [renamed, overwritten])
def test_a_file_that_is_exchanged_after_it_was_looked_into(
    swap: Callable[[Path, Path], None], clean: Path, poisoned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The very same bytes as were looked into are read, so the poison does nothing; and it is said."""
    check = Pt2.check

    def check_and_swap(file: Pt2, known: Collection[str] = ()) -> None:
        check(file, known)
        swap(poisoned, clean)

    monkeypatch.setattr(Pt2, "check", check_and_swap)
    with pytest.raises(ArtifactError) as raised:
        read_model(clean)
    assert str(raised.value) == f"{clean} was changed while it was read\n  help: read it again when it is whole"
    assert not (tmp_path / "marker").exists()


def test_a_program_that_lies_in_a_tensor(clean: Path) -> None:
    """By a local header that is longer than the directory says."""
    content, longer = bytearray(clean.read_bytes()), 200
    with zipfile.ZipFile(clean) as archive:
        info = next(info for info in archive.infolist() if info.filename.endswith("weights/weight_0"))
    (length,) = struct.unpack_from("<H", content, info.header_offset + 28)
    struct.pack_into("<H", content, info.header_offset + 28, length + longer)
    clean.write_bytes(content)
    with pytest.raises(ArtifactError, match=r"Bad CRC-32 for file .*weight_0"):
        read_model(clean)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "words", ["inspect {0}", "convert {0} --tp 2 --plan {1} --dry-run", "check {2}", "inspect {2} --rank 0"]
)
def test_a_pipe_is_no_file(words: str, tmp_path: Path) -> None:
    """Whoever opens one waits for a writer."""
    pipe, out = tmp_path / "pipe", tmp_path / "out"
    os.mkfifo(pipe)
    out.mkdir()
    os.mkfifo(out / MANIFEST)
    said = refused(*words.format(pipe, pipe, out).split())
    assert "cannot be read: it is a pipe or a device\n" in said


@pytest.mark.timeout(60)
def test_pipes_for_inputs_and_ranks(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(tpcompiler.InputsError, match="it is a pipe or a device"):
        read_inputs(tmp_path / "pipe", export_mlp())
    tpcompiler.parallelize(export_mlp(), 1, PLAN).save(tmp_path / "out")
    (tmp_path / "out" / "rank_0.pt2").unlink()
    os.mkfifo(tmp_path / "out" / "rank_0.pt2")
    assert "rank_0.pt2 cannot be read: it is a pipe or a device\n" in refused("check", tmp_path / "out")


def test_an_inputs_file_that_is_shortened_later(tmp_path: Path) -> None:
    """Of a mapped file the next look at a tensor would end the process."""
    save_file(mlp_inputs(), tmp_path / "in")
    args, kwargs = read_inputs(tmp_path / "in", export_mlp())
    os.truncate(tmp_path / "in", 0)
    given = {**kwargs, **dict(zip(mlp_inputs(), args, strict=False))}
    assert all(torch.equal(given[name], value) for name, value in mlp_inputs().items())


def test_a_plan_from_a_pipe_of_the_shell(tmp_path: Path) -> None:
    """`--plan <(command)`: its writer is there."""
    reader, writer = os.pipe()
    os.write(writer, b'"up": colwise\n')
    os.close(writer)
    try:
        assert list(tpcompiler.Plan.of(Path(f"/dev/fd/{reader}")).to_data()) == ["up"]
    finally:
        os.close(reader)


@pytest.mark.sample(7)
@pytest.mark.sweep
@pytest.mark.parametrize("command", ["check", "inspect"])
@pytest.mark.parametrize(
    "graph", [b"[]", b"{}", b"null", b"7", b"[" * 100_000, b'{"graph_module": {"graph": {"nodes": 3}}}', b"\xff", b""]
)
def test_a_rank_whose_program_is_none(command: str, graph: bytes, out: Path, tmp_path: Path) -> None:
    """Who can write the files can write their hashes."""
    path = copied(out, tmp_path) / "program.pt2"
    zipped(path, [(f"program/{n}", graph if n == "models/model.json" else c) for n, c in entries_of(path).items()])
    sign(path)
    words = (command, path.parent, *(("--rank", 1) if command == "inspect" else ()))
    assert refused(*words).startswith(f"{path} cannot be read by torch {torch.__version__}: ")


@pytest.mark.parametrize("change", [{"signature": None}, {"fqn": None}, None])
def test_a_program_that_does_not_say_what_it_takes(change: dict[str, None] | None, clean: Path) -> None:
    entries = entries_of(clean)
    data = json.loads(entries[MODEL])
    graph = data["graph_module"]["module_call_graph"]
    graph[0].update(change) if change else graph.clear()
    write_entries(clean, {**entries, MODEL: json.dumps(data).encode()})
    said = f"{clean}: it does not record the arguments and results of its program\n  help: export the model again\n"
    assert refused("inspect", clean) == said


def test_a_module_without_a_name(clean: Path) -> None:
    entries = entries_of(clean)
    data = json.loads(entries[MODEL])
    data["graph_module"]["module_call_graph"][-1]["fqn"] = []
    write_entries(clean, {**entries, MODEL: json.dumps(data).encode()})
    assert refused("inspect", clean) == f"{clean}: it names a module []\n  help: export the model again\n"


@pytest.mark.parametrize("content", [[], [("rank_1/", b"")]], ids=["no entry", "a folder"])
def test_a_rank_without_entries(content: list[tuple[str, bytes]], out: Path, tmp_path: Path) -> None:
    path = copied(out, tmp_path) / "rank_1.pt2"
    zipped(path, content)
    sign(path)
    assert refused("check", path.parent).startswith(f"{path} ")


def test_example_inputs_of_another_form(clean: Path, tmp_path: Path) -> None:
    entries = entries_of(clean)
    entries[EXAMPLES] = saved((torch.ones(2), torch.ones(2), torch.ones(2)))
    write_entries(tmp_path / "model.pt2", entries)
    said = "its example inputs are not the arguments that its program takes\n  help: export the model again"
    with pytest.raises(ArtifactError) as raised:
        read_model(tmp_path / "model.pt2")
    assert str(raised.value) == f"{tmp_path / 'model.pt2'}: {said}"


@pytest.mark.slow
def test_a_poisoned_rank_is_not_parsed(out: Path, tmp_path: Path) -> None:
    path = copied(out, tmp_path) / "rank_1.pt2"
    write_entries(path, {**entries_of(path), EXAMPLES: saved(((Fire(tmp_path / "marker"),), {}))})
    sign(path)
    assert "needs a pickle that may run code" in refused("check", path.parent)
    assert not (tmp_path / "marker").exists()


def copied(artifact: Path, folder: Path) -> Path:
    (folder / "out").mkdir()
    for file in artifact.iterdir():
        (folder / "out" / file.name).write_bytes(file.read_bytes())
    return folder / "out"


def sign(path: Path) -> None:
    manifest = path.with_name(MANIFEST)
    data = json.loads(manifest.read_text())
    data["files"][path.name] = sha256(path)
    manifest.write_text(json.dumps(data))
