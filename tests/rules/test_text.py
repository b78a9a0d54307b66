"""The text of every rule. docs/ops.md has its options too, and tests/op_db/test_page.py compares it."""

from __future__ import annotations

import re

import pytest

import tpcompiler.rules  # noqa: F401  (registers the rules)
from tests.rules.sample import Sample, node_of
from tests.rules.samples import SAMPLES, written_of


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_text(sample: Sample) -> None:
    written = written_of(node_of(sample))
    assert (None if written is None else _plain(written.text)) == sample.text


def _plain(text: str) -> str:
    """Without the spaces that empty terms leave."""
    return re.sub(r"\s+", " ", text).strip().replace(" ,", ",")
