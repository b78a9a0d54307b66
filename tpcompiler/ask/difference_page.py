"""Show the differences of two artifacts on the page of the second."""

from __future__ import annotations

import os

from msgspec.structs import asdict

from tpcompiler.artifact.program import ArtifactProgram
from tpcompiler.ask.difference import ArtifactDifference
from tpcompiler.views.html import html_of
from tpcompiler.views.page_data import page_data, printable


def difference_html(
    found: ArtifactDifference,
    first: ArtifactProgram,
    second: ArtifactProgram,
    machine: str | os.PathLike[str] | None = None,
) -> str:
    """The page of the second artifact, with the differences from the first marked, and listed in tables.

    Args:
        found: the differences, of `find_differences`.
        machine: whose times are predicted, as of `parallelize`.

    Raises:
        ArtifactError: a file is damaged or, without trust, could run code.
        MachineError: the description of the machine cannot be read.
    """
    data = page_data(second, first=first, machine=machine)
    data["name"] = f"{os.path.basename(os.path.abspath(first.title))} → {data['name']}"
    data["difference"] = {
        "equal": found.equal,
        "totals": found.totals(),
        "placements": [
            {**asdict(each), "pattern": pattern, "times": len(names)}
            for pattern, names, each in found.placements_alike()
        ],
        "collectives": [
            {**asdict(each), "pattern": pattern, "times": len(modules)}
            for pattern, modules, each in found.collectives_alike()
        ],
    }
    return html_of(printable(data))
