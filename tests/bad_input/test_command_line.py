"""What the table has no room for: sizes that do not divide, and a disk that is full at one time or another."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from torch.export import ExportedProgram

from tests.runtime.commands import refused
from tests.runtime.models import PLAN, PLAN_TEXT, export_conv, export_mlp
from tpcompiler import parallelize
from tpcompiler.errors import ShardingError


@pytest.fixture(scope="session")
def program() -> ExportedProgram:
    return export_mlp()


@pytest.fixture(scope="session")
def model(program: ExportedProgram, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bad") / "model.pt2"
    torch.export.save(program, path)
    return path


@pytest.fixture(scope="session")
def plan(model: Path) -> Path:
    path = model.with_name("plan.yaml")
    path.write_text(PLAN_TEXT)
    return path


@pytest.fixture(scope="session")
def pristine(model: Path, program: ExportedProgram) -> Path:
    directory = model.with_name("pristine")
    parallelize(program, 2, PLAN).save(directory)
    return directory


@pytest.fixture
def out(pristine: Path, tmp_path: Path) -> Path:
    """An artifact that a test may damage."""
    directory = tmp_path / "out"
    directory.mkdir()
    for file in pristine.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    return directory


@pytest.mark.parametrize("plan", [{"conv": "rowwise"}, {"conv.weight": "S(1)"}])
def test_a_size_that_does_not_divide(plan: dict[str, str]) -> None:
    with pytest.raises(ShardingError) as raised:
        parallelize(export_conv(), 4, plan)
    (name, style), *_ = plan.items()
    said = str(raised.value)
    assert said.startswith("cannot shard 'conv.weight' on dim 1")
    assert "3 over 4 leaves 1 empty" in said
    instead = "change 'conv' from rowwise to replicate" if name == "conv" else "pin 'conv.weight' to R"
    assert f", or {instead} (0 B sent per rank and call)" in said
    assert f'\n  asked by: the plan ("{name}": "{style}")      used at: models.py:' in said


def full_at_once(program: ExportedProgram, file: object, **more: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


save_whole = torch.export.save


def full_half_way(program: ExportedProgram, file: IO[bytes], **more: object) -> None:
    file.write(b"PK\x03\x04 and then the disk is full")
    raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0\nframe #0: more")


def full_at_the_second(program: ExportedProgram, file: Any, **more: Any) -> None:
    if isinstance(file, Path) and file.name == "rank_1.pt2":
        full_at_once(program, file)
    save_whole(program, file, **more)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("save", "reason"),
    [
        (full_at_once, "No space left on device"),
        (full_half_way, "[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0"),
        (full_at_the_second, "No space left on device"),
    ],
)
@pytest.mark.parametrize("force", [False, True])
def test_a_disk_that_is_full(
    save: Callable[[ExportedProgram, Path], None],
    reason: str,
    force: bool,
    model: Path,
    plan: Path,
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = out if force else out.with_name("new")
    before = {path: path.read_bytes() for path in out.iterdir()}
    monkeypatch.setattr(torch.export, "save", save)
    said = refused("convert", model, "--tp", 2, "--plan", plan, "-o", target, *(["--force"] if force else []))
    assert said == f"cannot write {target}: {reason}\n  help: check the free space and the permissions\n"
    assert {path: path.read_bytes() for path in out.iterdir()} == before
    assert list(out.parent.iterdir()) == [out]
