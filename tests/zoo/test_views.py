"""A small artifact in every format; `make trust` has all models of the zoo."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.needs import needs
from tests.views.artifacts import Mixed, saved
from tests.zoo.views import faults_of, views_of
from tpcompiler.runtime.artifact import read_manifest

pytestmark = needs("dot")


def test_every_format_is_right(tmp_path: Path) -> None:
    mixed = saved(tmp_path / "mixed", Mixed(), torch.zeros(4, 8), {"up": "colwise", "out": "colwise_gather_output"})
    assert list(faults_of(views_of(mixed), read_manifest(mixed))) == []
