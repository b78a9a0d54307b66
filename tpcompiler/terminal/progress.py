"""How far a long step is: the library tells, and whoever wants to show it listens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")
Listener = Callable[[str, str, int, int], None]  # the step, the unit that it is counted in, how many are done, of all
_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Let the listener hear of every step meanwhile: at its begin, when nothing is done, and then up to all of it."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def telling(step: str, unit: str) -> Callable[[int, int], None]:
    """What tells the listener, if there is one, how many are done, of all."""

    def tell(done: int, total: int) -> None:
        if (listener := _listener.get()) is not None:
            listener(step, unit, done, total)

    return tell


@contextmanager
def measured(step: str, unit: str, total: int) -> Iterator[Callable[[int], None]]:
    """What tells in the block how many are done; all are when it ends."""
    tell = telling(step, unit)

    def tell_some(done: int) -> None:
        if done < total:
            tell(done, total)

    tell_some(0)
    try:
        yield tell_some
    finally:
        tell(total, total)


def counted(items: Sequence[T], step: str, unit: str) -> Iterator[T]:
    """The items, of which there may become more; each is done when the next one is asked for, and all when none is."""
    tell = telling(step, unit)
    try:
        for done, item in enumerate(items):
            tell(done, len(items))
            yield item
    finally:
        tell(len(items), len(items))
