"""What holds for every test: no network, one thread for each process, an order, and how long a file may take."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tpcompiler
from tests.durations import VARIABLE, Durations, read_record
from tests.long import left_out
from tests.machines import WIRE
from tests.needs import Missing
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
    """What a module keeps for its tests ends with it: of a large heap, each look for garbage takes seconds."""
    yield
    for each in vars(request.module).values():
        if getattr(each, "__module__", "") == request.module.__name__ and hasattr(each, "cache_clear"):
            each.cache_clear()


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


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        return
    config.pluginmanager.register(Missing())
    if mode := os.environ.get(VARIABLE):
        config.pluginmanager.register(Durations(mode))


def pytest_collection_finish() -> None:
    """Torch's own million objects are looked through seldom: a tenth of all the time."""
    gc.collect()
    gc.set_threshold(50_000, 20, 50)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A part of each sweep, unless cases are selected by name; and the longest files first, so that workers end together."""
    named = config.option.keyword or len(items) == 1
    if thinned := [] if named else left_out(items):
        config.hook.pytest_deselected(items=thinned)
        items[:] = [item for item in items if item not in thinned]
    recorded = read_record()

    def order(item: pytest.Item) -> tuple[float, str, bool]:
        file = item.nodeid.partition("::")[0]
        return -recorded.get(file, 0.0), file, item.get_closest_marker("slow") is not None

    items.sort(key=order)
