"""What is written replaces nothing but what it may, and nothing before it is whole."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import tpcompiler
from tests.runtime.models import PLAN, export_mlp
from tests.runtime.test_artifact import content, manifest
from tests.runtime.written import write_artifact, write_set
from tpcompiler.errors import ArtifactError
from tpcompiler.runtime.artifact import MANIFEST, read_manifest
from tpcompiler.runtime.inputs import write_tensors
from tpcompiler.runtime.target import SET, free_target, replacing


def files_of(directory: Path) -> dict[str, str]:
    return {str(path.relative_to(directory)): path.read_text() for path in directory.rglob("*") if path.is_file()}


def stranger(out: Path) -> None:
    out.mkdir()
    (out / "notes.txt").write_text("mine")


def another_save(out: Path) -> None:
    write_artifact(out, manifest(plan={"w": "R"}), content)


def a_file(out: Path) -> None:
    out.write_text("mine")


def a_link(out: Path) -> None:
    out.symlink_to(out.parent)


def then(work: Callable[[], None]) -> Callable[[int, Path], None]:
    """Write the ranks' files, and do something else before the last."""

    def write(rank: int, path: Path) -> None:
        content(rank, path)
        if rank == 1:
            work()

    return write


@pytest.mark.parametrize("comes", [stranger, another_save, a_file, a_link])
def test_a_target_that_appears_meanwhile_is_left(comes: Callable[[Path], None], tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(ArtifactError) as raised:
        write_artifact(out, manifest(), then(lambda: comes(out)))
    assert str(raised.value) == f"{out} exists already\n  help: choose another directory, or pass force=True"
    if comes is another_save:
        assert read_manifest(out).plan == {"w": "R"}
    elif comes is stranger:
        assert files_of(out) == {"notes.txt": "mine"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("comes", [stranger, a_file])
def test_force_replaces_no_stranger(comes: Callable[[Path], None], tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(ArtifactError, match="exists and is not an artifact"):
        write_artifact(out, manifest(), then(lambda: comes(out)), force=True)
    assert out.read_text() == "mine" if comes is a_file else files_of(out) == {"notes.txt": "mine"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("after", [False, True])
def test_force_keeps_what_is_no_part_of_an_artifact(after: bool, tmp_path: Path) -> None:
    """In the artifact that is replaced: before, or since the save began."""
    out = tmp_path / "out"
    write_artifact(out, manifest(), content)

    def add() -> None:
        (out / "notes.txt").write_text("mine")

    if not after:
        add()
    before = files_of(out)
    with pytest.raises(ArtifactError) as raised:
        write_artifact(out, manifest(), then(add), force=True)
    assert str(raised.value) == (
        f"{out} holds 'notes.txt', which is not part of an artifact\n"
        "  help: move it elsewhere, or choose another directory"
    )
    assert files_of(out) == {**before, "notes.txt": "mine"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_file_that_comes_at_the_last_moment_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a process that works in the directory."""
    out = tmp_path / "out"
    write_artifact(out, manifest(), content)
    unlink = Path.unlink

    def add_and_unlink(path: Path, missing_ok: bool = False) -> None:
        if path.name == MANIFEST:
            path.with_name("notes.txt").write_text("mine")
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", add_and_unlink)
    with pytest.raises(ArtifactError, match=r"^the new artifact is written, but .* remains of the old one"):
        write_artifact(out, manifest(plan={"w": "R"}), content, force=True)
    assert read_manifest(out).plan == {"w": "R"}
    (old,) = (path for path in tmp_path.iterdir() if path != out)
    assert files_of(old) == {"artifact/notes.txt": "mine"}


def test_another_program_has_a_manifest_too(tmp_path: Path) -> None:
    """Of a web page, say."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / MANIFEST).write_text(json.dumps({"format": "glTF", "mesh": "mine.obj", "programs": []}))
    with pytest.raises(ArtifactError, match=r"exists and is not an artifact \(its manifest.json is another's\)"):
        free_target(tmp_path / "out", force=True)


@pytest.mark.parametrize("name", ["rank_0.pt2", "rank_9.pt2"])
def test_what_is_called_as_a_part_and_is_none(name: str, tmp_path: Path) -> None:
    """A folder, and a file that the manifest does not name."""
    out = tmp_path / "out"
    write_artifact(out, manifest(), content)
    (out / name).unlink(missing_ok=True)
    notes = out / name if name == "rank_9.pt2" else out / name / "notes.txt"
    notes.parent.mkdir(exist_ok=True)
    notes.write_text("mine")
    before = files_of(out)
    with pytest.raises(ArtifactError, match=rf"^{out} holds '{name}', which is not part of an artifact\n"):
        write_artifact(out, manifest(plan={"w": "R"}), content, force=True)
    assert files_of(out) == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_link_to_an_artifact_is_replaced_and_not_followed(tmp_path: Path) -> None:
    write_artifact(tmp_path / "real", manifest(), content)
    (tmp_path / "out").symlink_to(tmp_path / "real")
    write_artifact(tmp_path / "out", manifest(plan={"w": "R"}), content, force=True)
    assert not (tmp_path / "out").is_symlink()
    assert [read_manifest(tmp_path / name).plan for name in ("out", "real")] == [{"w": "R"}, {"w": "S(0)"}]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "real"]


def test_folders_that_were_made_for_nothing_are_removed(tmp_path: Path) -> None:
    for name in ("a" * 5000, "out"):
        with pytest.raises((ArtifactError, ZeroDivisionError)):
            write_artifact(tmp_path / "left" / "b" / name, manifest(), lambda rank, path: 1 // 0)  # type: ignore[arg-type, return-value]
        assert list(tmp_path.iterdir()) == []


def test_sets_are_replaced_too(tmp_path: Path) -> None:
    for degree in (1, 2):
        groups = {f"tp={degree}:tp": [list(range(degree))]}
        one = manifest(mesh={"tp": degree}, groups=groups)
        write_set(tmp_path / "out", {"prefill": (one, content), "decode": (one, content)}, force=True)
        assert read_manifest(tmp_path / "out" / "decode").world_size == degree
    (tmp_path / "out" / "decode" / "mine").mkdir()
    with pytest.raises(ArtifactError, match="decode holds 'mine', which is not part of an artifact"):
        write_set(tmp_path / "out", {"decode": (one, content)}, force=True)


def test_of_two_saves_one_is_refused(tmp_path: Path) -> None:
    """Both are at their ends at the same time."""
    ready, ended = threading.Barrier(2), []

    def save() -> None:
        def write(rank: int, path: Path) -> None:
            content(rank, path)
            if rank == 1:
                ready.wait(30)

        try:
            write_artifact(tmp_path / "out", manifest(), write)
            ended.append("written")
        except ArtifactError as error:
            ended.append(error.message)

    threads = [threading.Thread(target=save) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(ended) == [f"{tmp_path / 'out'} exists already", "written"]
    assert read_manifest(tmp_path / "out").world_size == 2
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_disk_without_room_is_found_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's writer ends the process where it finds out."""
    program = tpcompiler.parallelize(export_mlp(), 2, PLAN)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1_000))
    with pytest.raises(ArtifactError, match=f"^cannot write {tmp_path / 'out'}: No space left on device\n"):
        program.save(tmp_path / "out")
    with pytest.raises(ArtifactError, match=f"^cannot write {tmp_path / 'o'}: No space left on device\n"):
        write_tensors(tmp_path / "o", {"y": torch.ones(300)})
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_replaced_when_it_is_whole(tmp_path: Path) -> None:
    file = tmp_path / "out.svg"
    file.write_text("old")

    def half(path: Path) -> None:
        with replacing(path) as temporary:
            temporary.write_text("half")
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        half(file)
    assert files_of(tmp_path) == {"out.svg": "old"}
    with replacing(file) as temporary:
        temporary.write_text("new")
    assert files_of(tmp_path) == {"out.svg": "new"}


def test_a_link_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    for name in "ab":
        (tmp_path / name).symlink_to(tmp_path / "mine")
    write_tensors(tmp_path / "a", {"x": torch.ones(1)})
    with replacing(tmp_path / "b") as temporary:
        temporary.write_text("new")
    assert (tmp_path / "mine").read_text() == "mine"
    assert not any((tmp_path / name).is_symlink() for name in "ab")


def test_a_file_that_may_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though its directory may. (The system lets root write every file.)"""
    (tmp_path / "a").write_text("mine")
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path / "a")
    with pytest.raises(PermissionError), replacing(tmp_path / "a"):
        pass
    assert files_of(tmp_path) == {"a": "mine"}


def test_an_artifact_that_a_set_does_not_name_is_left(tmp_path: Path) -> None:
    """Somebody has put it beside the set's own programs."""
    target = tmp_path / "set"
    write_set(target, {"one": (manifest(), content)})
    write_artifact(target / "mine", manifest(), content)
    for programs in (["one"], None, [1], "mine"):
        (target / SET).write_text(json.dumps({"format": 2, "programs": programs}))
        with pytest.raises(ArtifactError, match="which is not part of an artifact"):
            free_target(target, force=True)
    shutil.rmtree(target / "mine")
    (target / SET).write_text(json.dumps({"format": 2, "programs": ["one"]}))
    free_target(target, force=True)


def test_a_name_that_is_no_text(tmp_path: Path) -> None:
    """torch's writer ends the process."""
    with pytest.raises(ArtifactError, match="its name is not text"):
        free_target(tmp_path / os.fsdecode(b"\x80out"), force=False)


def test_a_temporary_directory_that_becomes_a_link(tmp_path: Path) -> None:
    """Nothing of what it leads to is changed."""
    mine = tmp_path / "mine"
    mine.mkdir(mode=0o700)

    def exchange(rank: int, path: Path) -> None:
        content(rank, path)
        if rank:
            shutil.rmtree(path.parent)
            path.parent.symlink_to(mine)

    with pytest.raises((ArtifactError, OSError)):
        write_artifact(tmp_path / "out", manifest(), exchange)
    assert mine.stat().st_mode & 0o777 == 0o700
