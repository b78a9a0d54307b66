"""Sweeps of which the ordinary suite runs a part: `make trust` runs all of each.

`some` thins what a test goes through, and the marker `sweep` the cases of a parametrized test: `sweep(3)` keeps one in
three, `sweep` as few as have every value of every parameter. Cases selected by name (`-k`) all run.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TypeVar

import pytest

T = TypeVar("T")

LONG = "TPCOMPILER_LONG_TESTS"
in_long_runs = pytest.mark.skipif(not os.environ.get(LONG), reason="make trust runs it")


def some(items: Iterable[T], every: int) -> list[T]:
    """One in so many of the items, always the same ones; all of them in a long run."""
    return list(items)[:: 1 if os.environ.get(LONG) else every]


def left_to_all(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield the cases that `make test` leaves to `make test-all`: of a test marked `sample(n)` all but n."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sample"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for each in cases.values():
        marker = each[0].get_closest_marker("sample")
        assert marker is not None
        (count,) = marker.args
        kept = {at * len(each) // count for at in range(count)}
        yield from (item for at, item in enumerate(each) if at not in kept)


def left_out(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Return the cases of swept tests that a short run leaves out; a long run leaves out none."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sweep"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    out = []
    for each in cases.values():
        marker = each[0].get_closest_marker("sweep")
        assert marker is not None
        kept = some(each, *marker.args) if marker.args else _covering(each)
        out += [item for item in each if item not in kept]
    return out


def _covering(items: list[pytest.Item]) -> list[pytest.Item]:
    """Choose cases that between them have every value of every parameter; all of them in a long run."""
    if os.environ.get(LONG):
        return items
    values = {item: set(_values(item)) for item in items}
    lacking, used, kept = set[object]().union(*values.values()), Counter[object](), []
    while lacking:
        best = max(items, key=lambda item: (len(values[item] & lacking), -sum(used[value] for value in values[item])))
        kept.append(best)
        lacking -= values[best]
        used.update(values[best])
    return kept


def _values(item: pytest.Item) -> Iterator[object]:
    """Of each `parametrize` of a test the value that a case has, by its identity."""
    params: dict[str, object] = item.callspec.params  # type: ignore[attr-defined]  # which functions alone have
    for marker in item.iter_markers("parametrize"):
        names = marker.args[0]
        names = names.split(",") if isinstance(names, str) else names
        yield tuple((name, id(params[name.strip()])) for name in names)
