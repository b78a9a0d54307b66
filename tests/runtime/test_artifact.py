"""The written form: all or nothing, and what a reader refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.runtime.written import write_artifact
from tpcompiler.errors import ArtifactError
from tpcompiler.runtime.artifact import FORMAT, SINGLE, Manifest, read_manifest
from tpcompiler.runtime.program_files import ProgramFiles
from tpcompiler.runtime.records import Asked, Calling, TensorRecord

ROW = TensorRecord(name="w", kind="parameter", shape=[4], dtype="f32", sharding="S(0)")


def manifest(**fields: Any) -> Manifest:
    plain = Manifest(
        mesh={"tp": 2},
        groups={"tp=2:tp": [[0, 1]]},
        device_type="cpu",
        plan={"w": "S(0)"},
        tensors=[ROW],
        inputs=[],
        outputs=[],
        collectives=[],
        notes=[],
        output_type=None,
        versions={"torch": "2"},
        files={},
        calling=Calling(takes="*", returns="*", names=[], ranges={}, asserted=[], constants=[]),
        rank_numbers={},
        symm_mem={},
        programs={},
        asked=Asked(inputs=None, outputs=None),
        format=FORMAT,
    )
    return replace(plain, **fields)


def content(rank: int, path: Path) -> None:
    path.write_text(f"rank {rank}")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    write_artifact(tmp_path / "out", manifest(), content)
    return tmp_path / "out"


def test_what_is_written_is_read(out: Path) -> None:
    read = read_manifest(out)
    assert (read.mesh, read.tensors, read.world_size) == ({"tp": 2}, [ROW], 2)
    assert [ProgramFiles(SINGLE, out, read).open_weights(rank).path.read_text() for rank in range(2)] == [
        "rank 0",
        "rank 1",
    ]
    assert list(out.parent.iterdir()) == [out]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), OSError()])
@pytest.mark.parametrize("force", [False, True])
def test_a_write_that_fails_leaves_everything_as_it_was(out: Path, error: Exception, force: bool) -> None:
    def fail(rank: int, path: Path) -> None:
        content(rank, path)
        if rank == 1:
            raise error

    target = out if force else out.with_name("new")
    before = {path: path.read_text() for path in out.iterdir()}
    with pytest.raises(ArtifactError, match=f"^cannot write {target}: "):
        write_artifact(target, manifest(), fail, force=force)
    assert {path: path.read_text() for path in out.iterdir()} == before
    assert list(out.parent.iterdir()) == [out]


@pytest.mark.parametrize("broken", [KeyboardInterrupt, ValueError])
def test_any_other_end_leaves_nothing_behind(tmp_path: Path, broken: type[BaseException]) -> None:
    def stop(rank: int, path: Path) -> None:
        content(rank, path)
        raise broken

    with pytest.raises(broken):
        write_artifact(tmp_path / "out", manifest(), stop)
    assert list(tmp_path.iterdir()) == []


def test_the_old_artifact_comes_back_when_the_last_step_fails(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path: path.read_text() for path in out.iterdir()}
    rename = Path.rename

    def fail_into_place(self: Path, target: Path) -> Path:
        if target == out and self.name != "artifact":
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail_into_place)
    with pytest.raises(ArtifactError, match="Input/output error"):
        write_artifact(out, manifest(mesh={"tp": 1}, groups={}), content, force=True)
    assert {path: path.read_text() for path in out.iterdir()} == before
    assert list(out.parent.iterdir()) == [out]


def test_a_file_that_is_not_what_was_written(out: Path) -> None:
    read = read_manifest(out)
    with pytest.raises(ArtifactError, match=r"^rank 2 is outside the artifact's world of 2\n  help: use a rank from 0"):
        ProgramFiles(SINGLE, out, read).open_weights(2)
    (out / "rank_0.pt2").write_text("other")
    with pytest.raises(ArtifactError, match=r"rank_0.pt2 has SHA-256 [0-9a-f]{12}\.\., the manifest says [0-9a-f]{12}"):
        ProgramFiles(SINGLE, out, read).open_weights(0)
    (out / "rank_1.pt2").unlink()
    with pytest.raises(ArtifactError, match=r"rank_1.pt2 is missing"):
        ProgramFiles(SINGLE, out, read).open_weights(1)
