"""Shardings in words: every placement that is printed has some."""

from __future__ import annotations

import pytest
from hypothesis import given

from tests.ir.drawn import GRID, Cut, cuts
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.placements import describe_sharding
from tpcompiler.ir.sharding import Sharding

TP, SHARED = Mesh.of(4), Mesh.of(4).split("tp", 2)


@pytest.mark.parametrize(
    ("text", "mesh", "words"),
    [
        ("R", TP, "whole on every rank"),
        ("S(0)", TP, "dim 0 cut over tp"),
        ("P(sum) -> R", TP, "a partial sum on each rank of tp -> whole on every rank"),
        ("[S(0), R]", GRID, "dim 0 cut over dp"),
        ("[R, P(max)]", GRID, "a partial max on each rank of tp"),
        ("[R, R]", GRID, "whole on every rank"),
        ("S(2, unit 4, block 24)", TP, "dim 2 cut over tp in whole units of 4, each block of 24 by itself"),
        ("[S(0), S(0, outside dp)]", GRID, "dim 0 cut over dp, dim 0 cut over tp, before dp cuts it again"),
        (
            "S(0, parts 256 256b128 8r)",
            TP,
            "dim 0 cut over tp in 3 parts, each by itself (256; 256, each block of 128 by itself; 8 whole)",
        ),
        ("2xS(0) 2xR", SHARED, "dim 0 cut over tp[::2]"),
        (
            "[S(1), 2xP(sum) 2xS(0, unit 8)]",
            Mesh.of({"dp": 2, "tp": 4}, {"tp": [2, 2]}),
            "dim 1 cut over dp, a partial sum on each rank of tp[::2], dim 0 cut over tp[:2] in whole units of 8",
        ),
        ("S(0)", SHARED, "dim 0 cut over tp"),
        ("2xS(0) 2xR", TP, ""),
        ("", TP, ""),
        ("R, S(0)", TP, ""),
        ("S(2) or so", TP, ""),
    ],
)
def test_words(text: str, mesh: Mesh, words: str) -> None:
    assert describe_sharding(text, mesh) == words


@given(cuts())
def test_all_that_is_printed_has_words(drawn: Cut) -> None:
    _, by = drawn
    text = Sharding((by,)).text(GRID)
    words = describe_sharding(text, GRID)
    assert words
    assert all(axis in words for axis in by.axes)
