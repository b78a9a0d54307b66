"""A small artifact in every format; `make trust` has all models of the zoo."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.needs import needs
from tests.views.artifacts import LAYERS, Mixed, Tower, ids, saved
from tests.zoo.views import faults_of, views_of
from tpcompiler.runtime.artifact import read_manifest

pytestmark = needs("dot")


def test_every_format_is_right(tmp_path: Path) -> None:
    mixed = saved(tmp_path / "mixed", Mixed(), torch.zeros(4, 8), {"up": "colwise", "out": "colwise_gather_output"})
    assert list(faults_of(views_of(mixed), read_manifest(mixed))) == []


def test_what_is_not_whole_is_noticed(tmp_path: Path) -> None:
    """Negative control: of each format with a part left out, and of one artifact beside another."""
    tower = saved(tmp_path / "tower", Tower(), ids(), LAYERS)
    views, manifest = views_of(tower), read_manifest(tower)
    assert list(faults_of(views, manifest)) == []
    for name, content in views.items():
        assert list(faults_of({**views, name: content[: len(content) // 2]}, manifest)), name
    other = saved(tmp_path / "other", Tower(), ids(), {})
    for name, content in views_of(other).items():
        told = list(faults_of({**views, name: content}, manifest))
        assert told or name in ("dot", "png", "tensor.txt", "tensor.svg"), name
