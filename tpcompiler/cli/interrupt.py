"""Turn Ctrl-C into one word and exit code 130, even if the interrupted code raises another error."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import Any

INTERRUPTED = 130
_seen = False


def was_interrupted() -> bool:
    """Return True after Ctrl-C: half-imported modules may raise other errors."""
    return _seen


@contextlib.contextmanager
def watching() -> Iterator[None]:
    """Note Ctrl-C in the block, and ignore it from its end on, while the interpreter shuts down."""
    with contextlib.suppress(ValueError):  # not the main thread
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a job in the background ignores it
            signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGINT, signal.SIG_IGN)


def _interrupt(*_: Any) -> None:
    global _seen
    _seen = True
    raise KeyboardInterrupt
