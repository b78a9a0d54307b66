"""docs/ops.md is what the rules and the results say now."""

from __future__ import annotations

import json

import pytest

from tests.op_db import page
from tests.op_db.page import LINES, PAGE, RESULTS, Entry, read_lines, registry
from tpcompiler._torch import MISSING

CALL = {"call": "f", "op": "aten.f.default"}


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


def test_a_rule_that_changed_has_no_figure() -> None:
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    (row,) = (line for line in page.page(results).splitlines() if line.startswith("| softmax.int |"))
    assert " of " in row
    results["stamps"]["aten.softmax.int"] = "another"
    (row,) = (line for line in page.page(results).splitlines() if line.startswith("| softmax.int |"))
    assert " of " not in row


def test_a_stamp_covers_all_that_a_row_says() -> None:
    entry = Entry("op", ("a -> a",), "any", "")
    others = [
        Entry("op", ("a! -> a!",), "any", ""),
        Entry("op", ("a -> a",), "even", ""),
        Entry("op", ("a -> a",), "any", "own body"),
    ]
    assert len({e.stamp for e in (entry, *others)}) == 4
    assert len(registry()) > 100


def test_lines_count_only_what_holds_in_every_call() -> None:
    rows = {
        "shardable": [
            {**CALL, "call": "f(a)", "sound": [["f x -1", 0, 1], ["f x -2", 0, 0]]},
            {**CALL, "call": "f(b)", "sound": [["f x -2", 0, 0]]},
        ],
        "rules": [
            {**CALL, "call": "f(a)", "declined": [["f x -1", 0, 1, ""], ["f x -2", 0, 0, ""]]},
            {**CALL, "call": "f(b)", "declined": [["f x -1", 0, 1, ""], ["f x -2", 0, 0, "no rule"]]},
            {**CALL, "call": "f(c)", "declined": [["f x -2", 0, 0, "never run on shards"]]},
        ],
        "whole": [],
    }
    lines, cuts = page.lines_of(rows)
    assert lines == {"f x -2": "no rule"}
    assert cuts == {"shardable": 3, "offered": 2}
