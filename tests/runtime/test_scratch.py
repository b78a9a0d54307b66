"""Folders that are written into: those of killed processes go, those of live ones stay."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import tpcompiler
from tests.runtime.interrupted import NO_ROOM, forked, found, save
from tests.runtime.models import PLAN, export_mlp
from tpcompiler import ArtifactError
from tpcompiler.api import packaging
from tpcompiler.runtime.model_file import read_model
from tpcompiler.runtime.package import read_package
from tpcompiler.runtime.target import in_place_of, remove_leftovers, replacing, scratch_folder


def write_directory(directory: Path, end: Callable[[], object]) -> None:
    with in_place_of(directory / "out", force=True) as temporary:
        (temporary / "weights").write_bytes(b"half")
        end()


def write_file(directory: Path, end: Callable[[], object]) -> None:
    with replacing(directory / "out.pt2") as temporary:
        temporary.write_bytes(b"half")
        end()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.sweep
@pytest.mark.parametrize("write", [write_directory, write_file])
@pytest.mark.parametrize("name", ["out", "other"])
def test_what_a_killed_process_left_is_deleted(
    write: Callable[[Path, Callable[[], object]], None], name: str, tmp_path: Path
) -> None:
    """By whatever is written there next."""
    assert forked(lambda: write(tmp_path, die)) == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".out.tpcompiler-")
    save(tmp_path / name, b"a")
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert found(tmp_path / name) == "61"


def test_what_a_live_process_writes_is_left(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            write_directory(tmp_path, lambda: time.sleep(60))
        os._exit(1)
    try:
        while not (live := list(tmp_path.glob("*/weights"))):
            time.sleep(0.01)
        save(tmp_path / "out", b"a")
        assert live[0].exists()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_other_folders_are_left(tmp_path: Path) -> None:
    """Of another machine, whose locks may not be seen here; of a user; and a link to one of a user's."""
    with scratch_folder(tmp_path, "out") as live:
        mark = live.name
    (tmp_path / f".out.tpcompiler-000000{mark[-9:]}").mkdir()
    (tmp_path / ".out.notes").mkdir()
    (tmp_path / ".out.notes" / "mine").write_text("mine")
    (tmp_path / mark).symlink_to(tmp_path / ".out.notes")
    before = sorted(tmp_path.rglob("*"))
    remove_leftovers(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.slow
def test_what_reshard_writes_is_locked_to_its_end(tmp_path: Path) -> None:
    tpcompiler.parallelize(export_mlp(), 2, PLAN).save(tmp_path / "out", layout="shared")
    seen = []

    def look(done: int, total: int) -> None:
        seen.extend(tmp_path.glob(".new.*"))
        remove_leftovers(tmp_path)

    tpcompiler.open(tmp_path / "out").reshard(1, tmp_path / "new", progress=look)
    assert seen
    assert tpcompiler.open(tmp_path / "new").check().ok
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "out"]


@pytest.mark.slow
def test_a_package_on_a_full_disk(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """torch's writer of archives would end the process. No file may grow over 100 KiB once all is compiled."""
    out, library = tmp_path / "out", tmp_path_factory.mktemp("compiled") / "model.so"
    library.write_bytes(b"libstdc++.so" + bytes(200 << 10))
    tpcompiler.parallelize(export_mlp(), 2, PLAN).save(out, layout="shared")
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    def work() -> None:
        packaging._compile = lambda *_, **__: [str(library)]
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100 << 10, 100 << 10))
        tpcompiler.open(out).package(check=False)

    assert forked(work) == NO_ROOM
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert {path.name for path in out.iterdir()} == set(before)
    assert tpcompiler.open(out).check().ok
    assert read_package(out) is None


@pytest.mark.slow
def test_a_full_disk_for_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cut that cannot begin leaves no trace of one; nor does a merge that fails half-way."""
    tpcompiler.parallelize(export_mlp(), 2, PLAN).save(tmp_path / "out")
    tpcompiler.parallelize(read_model(tmp_path / "out" / "model.pt2"), 2, PLAN).save(tmp_path / "uncut")
    before = sorted(tmp_path.rglob("*"))

    def full(path: Path, *_: object, **__: object) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for write, call in (
        ("write_text", lambda: tpcompiler.open(tmp_path / "uncut").cut(tmp_path / "out")),
        ("write_text", lambda: tpcompiler.open(tmp_path / "out").reshard(1, tmp_path / "new")),
        ("write_bytes", lambda: tpcompiler.open(tmp_path / "out").merge(tmp_path / "new.pt2")),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(Path, write, full)
            with pytest.raises(
                ArtifactError, match=rf"^cannot write {tmp_path}/(new|uncut)\S*: No space left on device\n"
            ):
                call()
        assert sorted(tmp_path.rglob("*")) == before
