from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.interrupted import NO_ROOM, found, kill_saves, save, save_without_room


@pytest.mark.slow
def test_a_save_that_is_killed(tmp_path: Path) -> None:
    states = kill_saves(tmp_path, 6, seed=0)
    assert states["old"], states


def test_a_save_without_room(tmp_path: Path) -> None:
    save(tmp_path / "out", b"a")
    assert save_without_room(tmp_path) == NO_ROOM
    assert found(tmp_path / "out") == "61"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.slow
def test_half_an_artifact_would_be_seen(tmp_path: Path) -> None:
    save(tmp_path / "out", b"a")
    (tmp_path / "out" / "rank_3.pt2").write_bytes(b"b")
    with pytest.raises(Exception, match="SHA-256"):
        found(tmp_path / "out")
