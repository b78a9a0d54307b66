"""What holds for every test: no network, one thread for each process, and which cases `make test` runs."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tpcompiler
from tests.long import left_out, left_to_all
from tests.machines import WIRE
from tests.runtime.models import PLAN, export_mlp

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TPCOMPILER_MACHINE"] = WIRE
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for launched processes; torch has read its own already
os.environ.setdefault("TPCOMPILER_PATIENCE", "1e6")  # no lines for steps that last, on however slow a machine
os.environ.setdefault("AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL", "O0")  # is compiled sooner
torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def machine(request: pytest.FixtureRequest) -> Iterator[None]:
    """The machine that placements are for: what a module calls `MACHINE`, or one on which only bytes sent count."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TPCOMPILER_MACHINE", getattr(request.module, "MACHINE", WIRE))
        yield


@pytest.fixture(scope="module", autouse=True)
def forget(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a module keeps for its tests ends with it, and what refers to itself, as graphs do: a worker stays small."""
    yield
    for each in vars(request.module).values():
        if getattr(each, "__module__", "") == request.module.__name__ and hasattr(each, "cache_clear"):
            each.cache_clear()
    gc.collect()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model in a file: `export_mlp`."""
    path = tmp_path_factory.mktemp("model") / "model.pt2"
    torch.export.save(export_mlp(), path)
    return path


@pytest.fixture(scope="session")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its artifact for two ranks, to be read: who changes one copies it."""
    path = tmp_path_factory.mktemp("artifact") / "out"
    tpcompiler.parallelize(export_mlp(), 2, PLAN).save(path)
    return path


def pytest_collection_finish() -> None:
    """Torch's own million objects are not looked through again: a tenth of all the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


@pytest.hookimpl(tryfirst=True)  # before pytest's own looks for marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out most cases of each sweep, unless cases are selected by name, and more of them in `make test`."""
    named = config.option.keyword or len(items) == 1
    if thinned := [] if named else left_out(items):
        config.hook.pytest_deselected(items=thinned)
        items[:] = [item for item in items if item not in thinned]
    for item in left_to_all(items):
        item.add_marker(pytest.mark.slow)
