"""`python -m tests.trust`: the figures of docs/trust.md, but for the zoo, mutants and random programs."""

from __future__ import annotations

import sys
import warnings

from rich.console import Console
from rich.table import Table

from tests.trust.long_runs import Figure, faults, kills, large


def main() -> int:
    warnings.simplefilter("ignore")
    console = Console()
    table = Table("what", "figure", "")
    found: list[Figure] = []
    for work in (lambda: large(32, 8), lambda: kills(200), lambda: faults(50)):
        figure = work()
        found.append(figure)
        console.print(f"{figure.what}: {figure.figure}", markup=False, soft_wrap=True)
        table.add_row(figure.what, figure.figure.splitlines()[0], "ok" if figure.ok else "FAILS")
    console.print(table)
    return 0 if all(figure.ok for figure in found) else 1


if __name__ == "__main__":
    sys.exit(main())
