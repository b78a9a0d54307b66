"""Shardings in words: every placement that is printed has some."""

from __future__ import annotations

import pytest
from hypothesis import given

from tests.ir.drawn import GRID, Cut, cuts
from tpcompiler.ir.placement_words import describe_sharding
from tpcompiler.ir.sharding import Sharding


@pytest.mark.parametrize(
    ("text", "axes", "words"),
    [
        ("R", ["tp"], "whole on every rank"),
        ("S(0)", ["tp"], "dim 0 cut over tp"),
        ("P(sum) -> R", ["tp"], "a partial sum on each rank of tp -> whole on every rank"),
        ("[S(0), R]", ["dp", "tp"], "dim 0 cut over dp"),
        ("[R, P(max)]", ["dp", "tp"], "a partial max on each rank of tp"),
        ("[R, R]", ["dp", "tp"], "whole on every rank"),
        ("S(2, unit 4, block 24)", ["tp"], "dim 2 cut over tp in whole units of 4, each block of 24 by itself"),
        ("[S(0), S(0, outside dp)]", ["dp", "tp"], "dim 0 cut over dp, dim 0 cut over tp, before dp cuts it again"),
        (
            "S(0, parts 256 256b128 8r)",
            ["tp"],
            "dim 0 cut over tp in 3 parts, each by itself (256; 256, each block of 128 by itself; 8 whole)",
        ),
        ("", ["tp"], ""),
        ("R, S(0)", ["tp"], ""),
        ("S(2) or so", ["tp"], ""),
    ],
)
def test_words(text: str, axes: list[str], words: str) -> None:
    assert describe_sharding(text, axes) == words


@given(cuts())
def test_all_that_is_printed_has_words(drawn: Cut) -> None:
    _, by = drawn
    text = Sharding((by,)).text(GRID)
    words = describe_sharding(text, GRID.names)
    assert words
    assert all(axis in words for axis in by.axes)
