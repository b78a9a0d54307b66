"""Real processes of which one dies, comes late, or has something else: nobody hangs, and the others say why."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.long import some
from tests.runtime.faults import FAULTS, run_fault, write_artifacts, wrong

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_artifacts(tmp_path_factory.mktemp("faults"))


@pytest.mark.parametrize("fault", some(list(FAULTS), 2))
def test_fault(fault: str, artifact: Path) -> None:
    assert not wrong(fault, run_fault(artifact, fault))
