"""Names that repeat are shown once."""

from __future__ import annotations

import pytest

from tpcompiler.ir.names import fold_names


@pytest.mark.parametrize(
    ("signatures", "expected"),
    [
        ({"a.0.up": 1, "a.1.up": 1}, {"a.*.up": ["a.0.up", "a.1.up"]}),
        ({"a.0.up": 1}, {"a.0.up": ["a.0.up"]}),
        ({"seq.0": 1, "seq.2": 2}, {"seq.0": ["seq.0"], "seq.2": ["seq.2"]}),
        (
            {"a.0.b.0": 1, "a.0.b.1": 2, "a.1.b.0": 1, "a.1.b.1": 2},
            {"a.*.b.0": ["a.0.b.0", "a.1.b.0"], "a.*.b.1": ["a.0.b.1", "a.1.b.1"]},
        ),
        (
            {"a.0.b.0": 1, "a.0.b.1": 1, "a.1.b.0": 2, "a.1.b.1": 2},
            {"a.0.b.*": ["a.0.b.0", "a.0.b.1"], "a.1.b.*": ["a.1.b.0", "a.1.b.1"]},
        ),
        ({"a.0": 1, "b.0": 1, "a.1": 1}, {"a.*": ["a.0", "a.1"], "b.0": ["b.0"]}),
        ({}, {}),
    ],
)
def test_folded(signatures: dict[str, int], expected: dict[str, list[str]]) -> None:
    assert dict(fold_names(signatures)) == expected
