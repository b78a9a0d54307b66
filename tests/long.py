"""Sweeps of which the ordinary suite runs a part: `make trust` runs all of each."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")

LONG = "TPCOMPILER_LONG_TESTS"


def some(items: Iterable[T], every: int) -> list[T]:
    """One in so many of the items, always the same ones; all of them in a long run."""
    return list(items)[:: 1 if os.environ.get(LONG) else every]
