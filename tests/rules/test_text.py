"""The text of every rule."""

from __future__ import annotations

import re

import pytest
import torch

import tpcompiler.rules  # noqa: F401  (registers the rules)
from tests.rules.sample import Sample, node_of
from tests.rules.samples import SAMPLES, written_of
from tpcompiler.rules.registry import rule_of


@pytest.mark.sample(297)
@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_text(sample: Sample) -> None:
    written = written_of(node_of(sample))
    assert (None if written is None else _plain(written.text)) == sample.text


def test_rows_that_any_cpu_packs_together_stay_together() -> None:
    """A CPU without AVX-512 packs 32, so that it shows no wrong number."""
    (packed,) = (sample for sample in SAMPLES if sample.target is torch.ops.aten._weight_int4pack_mm_for_cpu.default)
    assert rule_of(node_of(packed)).extent["n_"] == 64


def _plain(text: str) -> str:
    """Without the spaces that empty terms leave."""
    return re.sub(r"\s+", " ", text).strip().replace(" ,", ",")
