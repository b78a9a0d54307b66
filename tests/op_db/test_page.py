"""docs/ops.md is what the rules and the results say now."""

from __future__ import annotations

import json

import pytest

from tests.op_db import page
from tests.op_db.page import LINES, PAGE, RESULTS, read_lines
from tpcompiler._torch import MISSING


@pytest.mark.skipif(not PAGE.exists(), reason="an installed wheel has no docs beside the tests")
@pytest.mark.skipif(bool(MISSING), reason="the page has the ops of torch 2.13, and this torch lacks some of them")
def test_the_page_is_fresh() -> None:
    """If not: python -m tools.op_coverage page"""
    assert PAGE.read_text(encoding="utf-8") == page.page(json.loads(RESULTS.read_text(encoding="utf-8")))


def test_the_figures_are_those_of_the_list() -> None:
    lines, results = read_lines(), json.loads(RESULTS.read_text(encoding="utf-8"))
    offered = [line for line, section in lines.items() if section == "offered"]
    assert results["lines"] == {"shardable": len(lines), "offered": len(offered)}
    assert len(set(lines)) == LINES.read_text(encoding="utf-8").count("\naten.") + sum(
        not line.startswith("aten.") for line in lines
    )


def test_nothing_is_wrong() -> None:
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    for part in (results["whole"], results["calls"]):
        assert part["right"] > 1000
        assert {"wrong", "crash"}.isdisjoint(part)
