"""What holds for every test: no network, one thread for each process, the longest files first and then fast tests."""

from __future__ import annotations

import os

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for launched processes; torch has read its own already
torch.set_num_threads(1)

# Minutes each: begun first, so that no worker is left with one when the others have ended.
LONGEST = (
    "tests/zoo/test_zoo.py",
    "tests/property/test_programs.py",
    "tests/trust/test_mutants.py",
    "tests/passes/test_shared_heads.py",
    "tests/promises/test_again.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def order(item: pytest.Item) -> tuple[int, bool]:
        file = item.nodeid.partition("::")[0]
        return LONGEST.index(file) if file in LONGEST else len(LONGEST), item.get_closest_marker("slow") is not None

    items.sort(key=order)
