"""docs/sharding.md draws what the code does now."""

from __future__ import annotations

import pytest

from tools import sharding_page
from tpcompiler.ir.mesh import Mesh


@pytest.mark.skipif(not sharding_page.PAGE.exists(), reason="an installed wheel has no docs beside the tests")
def test_the_page_is_fresh() -> None:
    """If not: python -m tools.sharding_page"""
    assert sharding_page.PAGE.read_text(encoding="utf-8") == sharding_page.page()


@pytest.mark.slow
def test_a_drawing_shows_who_holds_what() -> None:
    mesh = Mesh((("dp", 2), ("tp", 2)))
    assert sharding_page.drawing(mesh, "[S(0), S(1, parts 4 4r)]") == "\n".join(
        2 * ["0    0    1    1    0,1  0,1  0,1  0,1"] + 2 * ["2    2    3    3    2,3  2,3  2,3  2,3"]
    )
    assert sharding_page.drawing(mesh, "[P(sum), S(0)]").splitlines()[0] == "  ".join(["0+2"] * 8)
    assert sharding_page.drawing(mesh, "[S(0), S(1)]") != sharding_page.drawing(mesh, "[S(1), S(0)]")
