"""Sweeps of which the ordinary suite runs a part: `make trust` runs all of each.

`some` thins what a test goes through, the marker `sweep` the cases that a test is parametrized with.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TypeVar

import pytest

T = TypeVar("T")

LONG = "TPCOMPILER_LONG_TESTS"
in_long_runs = pytest.mark.skipif(not os.environ.get(LONG), reason="make trust runs it")


def some(items: Iterable[T], every: int) -> list[T]:
    """One in so many of the items, always the same ones; all of them in a long run."""
    return list(items)[:: 1 if os.environ.get(LONG) else every]


def left_out(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Of the tests with `@pytest.mark.sweep(every)` all cases but one in so many."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sweep"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    out = []
    for each in cases.values():
        marker = each[0].get_closest_marker("sweep")
        assert marker is not None
        kept = some(each, marker.args[0])
        out += [item for item in each if item not in kept]
    return out
