"""The checked-in results agree with the checked-in list."""

from __future__ import annotations

import json

from tests.op_db.page import LINES, RESULTS, read_lines


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
