"""The page of an artifact: one self-contained HTML file that opens without a network."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Mapping
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from msgspec.structs import asdict

from tpcompiler.artifact.program import ArtifactProgram
from tpcompiler.report.difference import ArtifactDifference
from tpcompiler.report.page_data import NO_ADVICE, page_data, printable

HERE = Path(__file__).parent
SCRIPTS = (
    "vendor/cytoscape.min.js",
    "vendor/cytoscape-dagre.min.js",
    "page/graph.js",
    "page/panel.js",
    "page/difference.js",
    "page/page.js",
)
STYLE = "page/page.css"


def artifact_html(
    program: ArtifactProgram,
    rank: int = 0,
    *,
    machine: str | os.PathLike[str] | None = None,
    advice: Mapping[str, str] = NO_ADVICE,
) -> str:
    """Return the program of one rank as a page: the folded graph, slices of tensors, costs, predicted times.

    The reader can choose another rank. Ranks with other local shapes have separate graphs in the page. Only the scripts
    and the style in the page can run or be fetched (Content-Security-Policy), and data from files is one block of JSON,
    in which no tag can end.

    Args:
        machine: the machine to predict times for, as in `parallelize`.
        advice: reshard name -> the change of the plan that avoids the fallback.

    Raises:
        ArtifactError: the artifact is missing or damaged, or the rank is outside its world.
        MachineError: the description of the machine cannot be read.
    """
    data = page_data(program, rank, machine=machine, advice=advice)
    shown, others = set(data["ranks"]), []
    for other in range(data["world"]):
        if other not in shown:
            others.append(page_data(program, other, machine=machine, advice=advice))
            shown.update(others[-1]["ranks"])
    return html_of({**data, "others": others})


def html_of(data: Mapping[str, Any]) -> str:
    """Return the page for the data of `page_data`."""
    scripts, style = [_text(name) for name in SCRIPTS], _text(STYLE)
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_hash, scripts))}; style-src {_hash(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    return Template(_text("page/page.html")).substitute(
        policy=escape(policy),
        title=escape(f"{data['name']}: mesh {data['mesh']}, rank {data['rank']}"),
        style=style,
        data=_json(data),
        scripts="\n".join(f"<script>{script}</script>" for script in scripts),
    )


def _json(data: object) -> str:
    """Return JSON that HTML reads as plain text."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c").replace(">", "\\u003e")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _text(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


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
