"""Loading in a world of one process: what fits is loaded, what does not is refused before anything is sent."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace

from tests.runtime.models import PLAN, export_mlp
from tpcompiler import load, parallelize
from tpcompiler.errors import ArtifactError, LaunchError, UnsupportedError
from tpcompiler.judge.compare.processes import share_gpus
from tpcompiler.runtime.artifact import read_manifest
from tpcompiler.runtime.world import own_device, warn_of_machines


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
def test_a_mode_is_refused_by_name(artifacts: Path) -> None:
    module = load(artifacts / "one")
    for change in (module.train, module.eval, lambda: module.train(False)):
        with pytest.raises(UnsupportedError, match="a loaded module cannot be set to train or eval"):
            change()


@pytest.mark.usefixtures("world_of_one")
def test_another_rank(artifacts: Path) -> None:
    with pytest.raises(LaunchError) as raised:
        load(artifacts / "one", rank=1)
    assert str(raised.value) == ("rank 1 was requested in the process of rank 0\n  help: leave rank out under torchrun")


@pytest.mark.usefixtures("world_of_one")
def test_a_damaged_file(artifacts: Path, tmp_path: Path) -> None:
    for file in (artifacts / "one").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "rank_0.pt2").write_bytes(b"PK")
    with pytest.raises(ArtifactError, match="has SHA-256"):
        load(tmp_path)


@pytest.fixture(scope="module")
def for_cuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("load_cuda")
    parallelize(export_mlp(), 2, PLAN, device_type="cuda").save(path / "two")
    return path / "two"


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[torch.device]]:
    """Lets torch seem to have some GPUs; returns what `torch.cuda.set_device` is then called with."""

    def pretend(count: int) -> list[torch.device]:
        chosen: list[torch.device] = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
        return chosen

    return pretend


def environment(monkeypatch: pytest.MonkeyPatch, **names: str) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in names.items():
        monkeypatch.setenv(name, value)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("names", "processes"),
    [({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, 2), ({"LOCAL_RANK": "3"}, 4), ({"LOCAL_WORLD_SIZE": "2"}, 2)],
)
def test_fewer_gpus_than_processes(
    names: dict[str, str],
    processes: int,
    for_cuda: Path,
    gpus: Callable[[int], list[torch.device]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen = gpus(1)
    environment(monkeypatch, RANK="1", WORLD_SIZE="2", **names)
    with pytest.raises(LaunchError) as raised:
        load(for_cuda)
    assert str(raised.value) == (
        f"{processes} processes on this machine, and torch finds 1 CUDA device: NCCL needs one each\n"
        "  help: start 1 on a machine, each of which sees all its GPUs (CUDA_VISIBLE_DEVICES)"
    )
    assert chosen == []


def test_processes_that_share_a_gpu(
    for_cuda: Path, gpus: Callable[[int], list[torch.device]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `verify` of a package starts them: NCCL takes each for a machine of its own."""
    chosen = gpus(1)
    environment(monkeypatch, RANK="1", WORLD_SIZE="2", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2")
    for name in ("NCCL_HOSTID", "NCCL_SOCKET_IFNAME", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)  # what is set from here on is unset after the test
    share_gpus()
    assert os.environ["NCCL_HOSTID"] == "1"
    assert own_device(read_manifest(for_cuda)) == torch.device("cuda:0")
    assert chosen == [torch.device("cuda:0")]


def test_gloo_gathers_nothing_on_a_gpu(
    for_cuda: Path, gpus: Callable[[int], list[torch.device]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch ends the process there; what only reduces runs."""
    chosen = gpus(1)
    environment(monkeypatch, RANK="0", WORLD_SIZE="2")
    manifest = read_manifest(for_cuda)
    own_device(manifest, "gloo")
    assert {row.kind for row in manifest.collectives} == {"all_reduce"}
    gathering = replace(manifest, collectives=[replace(manifest.collectives[0], kind="all_gather")])
    assert own_device(gathering) == torch.device("cuda:0")  # NCCL
    with pytest.raises(LaunchError, match=r"^1 all_gather of tensors on GPUs"):
        own_device(gathering, "gloo")
    assert chosen == [torch.device("cuda:0")] * 2


@pytest.mark.parametrize(
    ("names", "device"),
    [
        ({"RANK": "5", "LOCAL_RANK": "1"}, "cuda:1"),  # the second process of the second machine
        ({"RANK": "1"}, "cuda:1"),
        ({"RANK": "6"}, "cuda:2"),
        ({}, "cuda:0"),
    ],
)
def test_the_gpu_of_this_process(
    names: dict[str, str],
    device: str,
    for_cuda: Path,
    gpus: Callable[[int], list[torch.device]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen = gpus(4)
    environment(monkeypatch, **names)
    assert str(own_device(read_manifest(for_cuda))) == device
    assert chosen == [torch.device(device)]


def test_the_gpu_is_taken_before_nccl_is_asked_for(
    for_cuda: Path, gpus: Callable[[int], list[torch.device]], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = gpus(2)
    environment(monkeypatch, RANK="1", WORLD_SIZE="2", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")

    def join(backend: str, timeout: timedelta) -> None:
        assert (backend, chosen) == ("nccl", [torch.device("cuda:1")])
        raise InterruptedError  # there is no NCCL here

    monkeypatch.setattr(dist, "init_process_group", join)
    with pytest.raises(InterruptedError):
        load(for_cuda)


@pytest.mark.parametrize(
    ("mesh", "there", "said"),
    [
        ({"dp": 2, "tp": 4}, "4", ""),
        ({"dp": 2, "tp": 4}, "8", ""),
        ({"tp": 4, "dp": 2}, "4", ""),
        ({"dp": 2, "tp": 4}, "2", "'tp' of 4 ranks spans several machines of 2 processes.*put 'dp' last"),
        ({"tp": 8}, "6", "'tp' of 8 ranks spans several machines of 6 processes.*a degree that divides 6"),
    ],
)
@pytest.mark.usefixtures("world_of_one")
def test_an_axis_on_several_machines(
    mesh: dict[str, int], there: str, said: str, artifacts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", there)
    manifest = replace(read_manifest(artifacts / "one"), mesh=mesh, groups={}, rank_numbers={}, programs={})
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        warn_of_machines(manifest)
    assert len(heard) == bool(said)
    assert re.search(said, str(heard[0].message) if heard else "")


@pytest.mark.usefixtures("world_of_one")
def test_a_group_that_does_not_answer_is_named(artifacts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(*_: object, **__: object) -> None:
        raise RuntimeError("Timed out waiting 300000ms")

    monkeypatch.setattr(dist, "all_reduce", silent)
    with pytest.raises(
        LaunchError, match=r"the group 'tp=1:tp' of the ranks \[0\] did not answer within 300 s: Timed out"
    ):
        load(artifacts / "one")
    monkeypatch.setattr(dist, "all_reduce", lambda value, group: value.fill_(2))
    with pytest.raises(LaunchError, match="did not answer within 300 s: counts 2 ranks"):
        load(artifacts / "one")


@pytest.mark.slow
def test_weights_are_put_on_the_device(artifacts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The meta device stands in for the GPU that is not here."""
    monkeypatch.setattr("tpcompiler.runtime.world.own_device", lambda manifest, backend: torch.device("meta"))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        module = load(artifacts / "one")
    finally:
        dist.destroy_process_group()
    assert {value.device.type for value in module.state_dict().values()} == {"meta"}
    assert {value.device.type for value in module.exported_program.state_dict.values()} == {"meta"}
