"""The command line, a file for each group of commands."""

from __future__ import annotations

import sys
from typing import Any

from tpcompiler.cli.interrupt import INTERRUPTED, watching


def main() -> None:
    """The entry point: commands are imported where Ctrl-C is no traceback."""
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
