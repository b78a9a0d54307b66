"""Loading in a world of one process: what fits is loaded, what does not is refused before anything is sent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.runtime.models import PLAN, export_mlp, mlp_inputs
from tpcompiler import load, parallelize
from tpcompiler.errors import ArtifactError, LaunchError


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`one` and `two`: the same model for worlds of these sizes."""
    path = tmp_path_factory.mktemp("load")
    for name, degree in (("one", 1), ("two", 2)):
        parallelize(export_mlp(), degree, PLAN).save(path / name)
    return path


@pytest.fixture
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("world_of_one")
def test_load_in_a_world_of_one(artifacts: Path) -> None:
    module = load(artifacts / "one")
    inputs = mlp_inputs(seed=3).values()
    expected = export_mlp().module()(*inputs)
    torch.testing.assert_close(module(*inputs), expected)
    assert isinstance(module.exported_program, torch.export.ExportedProgram)
    torch.testing.assert_close(load(artifacts / "one", rank=0)(*inputs), expected)


@pytest.mark.usefixtures("world_of_one")
def test_another_rank(artifacts: Path) -> None:
    with pytest.raises(LaunchError) as raised:
        load(artifacts / "one", rank=1)
    assert str(raised.value) == ("rank 1 was asked for in the process of rank 0\n  help: leave rank out under torchrun")


@pytest.mark.usefixtures("world_of_one")
def test_another_world(artifacts: Path) -> None:
    with pytest.raises(LaunchError, match=r"^the artifact is for 2 ranks, this world has 1\n"):
        load(artifacts / "two")


@pytest.mark.usefixtures("world_of_one")
def test_a_damaged_file(artifacts: Path, tmp_path: Path) -> None:
    for file in (artifacts / "one").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "rank_0.pt2").write_bytes(b"PK")
    with pytest.raises(ArtifactError, match="has SHA-256"):
        load(tmp_path)


@pytest.mark.parametrize(("name", "size"), [("RANK", "1"), ("WORLD_SIZE", "2")])
def test_half_an_environment(artifacts: Path, name: str, size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for each in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, size)
    with pytest.raises(LaunchError, match=r"^this process is part of no group: RANK and WORLD_SIZE are not set\n"):
        load(artifacts / "two")
    assert not dist.is_initialized()
