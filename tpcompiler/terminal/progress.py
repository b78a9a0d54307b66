"""Progress of long steps: the library reports it, and a listener may show it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")
Listener = Callable[[str, str, int, int], None]  # (step, unit, number done, total)
_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Report every step in the block to the listener: at its start, with nothing done, and then up to its end."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def reporting(step: str, unit: str) -> Callable[[int, int], None]:
    """Return a function that reports (number done, total) to the listener, if there is one."""

    def report(done: int, total: int) -> None:
        if (listener := _listener.get()) is not None:
            listener(step, unit, done, total)

    return report


@contextmanager
def measured(step: str, unit: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that reports the number done; the step is complete when the block ends."""
    report = reporting(step, unit)

    def report_some(done: int) -> None:
        if done < total:
            report(done, total)

    report_some(0)
    try:
        yield report_some
    finally:
        report(total, total)


def counted(items: Sequence[T], step: str, unit: str) -> Iterator[T]:
    """Yield the items, whose list may grow, and report each as done when the next one is requested."""
    report = reporting(step, unit)
    try:
        for done, item in enumerate(items):
            report(done, len(items))
            yield item
    finally:
        report(len(items), len(items))
