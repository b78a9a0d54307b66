"""docs/scale.md is what `python -m tools.scale` wrote of its models."""

from __future__ import annotations

import re

import pytest

from tools.scale import DEGREES, HEAD, MODELS, PAGE


@pytest.mark.skipif(not PAGE.exists(), reason="an installed wheel has no docs beside the tests")
def test_the_page_has_every_model_and_degree() -> None:
    """If not: python -m tools.scale"""
    text = PAGE.read_text(encoding="utf-8")
    assert text.startswith(HEAD)
    rows = [row.split(" | ") for row in re.findall(r"^\| (.*) \|$", text[len(HEAD) :], re.MULTILINE)]
    found = [(row[0], int(row[2])) for row in rows]
    assert found == [pair for name in MODELS for degree in DEGREES if (pair := (name, degree)) in found]
    assert {name for name, _ in found} == MODELS.keys()
    assert all(float(row[6].removesuffix(" GiB")) < 4 for row in rows)
