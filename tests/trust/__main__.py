"""`python -m tests.trust [STEP ...]`: the figures of docs/trust.md, all or those named; ends with one table."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from tests.trust.steps import STEPS, measured


def main(words: Sequence[str]) -> int:
    """Measure step after step, whatever becomes of those before; 1 if one of them is not as it must be."""
    parser = argparse.ArgumentParser(prog="python -m tests.trust", description=__doc__)
    parser.add_argument("steps", nargs="*", help=f"of {', '.join(STEPS)}")
    asked = parser.parse_args(words).steps or list(STEPS)
    if unknown := sorted(set(asked) - STEPS.keys()):
        parser.error(f"there is no step {unknown[0]!r}; there are {', '.join(STEPS)}")
    warnings.simplefilter("ignore")
    console = Console()
    table = Table("what", "figure", "minutes", "")
    found = []
    for name in asked:
        console.rule(name)
        figure, seconds = measured(STEPS[name])
        found.append(figure)
        console.print(f"{figure.what}: {figure.figure}", markup=False, soft_wrap=True)
        verdict = "ok" if figure.ok else "FAILS"
        table.add_row(figure.what, figure.figure.splitlines()[0], f"{seconds / 60:.1f}", verdict)
    console.print(table)
    return 0 if all(figure.ok for figure in found) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
