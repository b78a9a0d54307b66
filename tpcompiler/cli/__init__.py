"""The command line: one file for each group of commands."""

from __future__ import annotations

import contextlib
import gc
import signal
import sys
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


def main() -> None:
    """Import and run the commands; Ctrl-C never prints a traceback."""
    gc.set_threshold(50_000, 20, 50)  # looking through torch's own million objects takes a tenth of all the time
    with watching():
        try:
            from tpcompiler.cli.commands import main as run_commands

            run_commands()
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            sys.exit(INTERRUPTED)


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module 'tpcompiler.cli' has no attribute {name!r}")
    import tpcompiler.cli.commands  # noqa: F401  (registers them)
    from tpcompiler.cli.options import app

    return app
