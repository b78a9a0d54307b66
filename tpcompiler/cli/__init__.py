"""The command line: one file for each group of commands."""

from __future__ import annotations

import gc
import sys
from typing import Any

from tpcompiler.cli.interrupt import INTERRUPTED, watching


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
