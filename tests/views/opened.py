"""Views of the artifacts in directories."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import graphviz

import tpcompiler
from tpcompiler.report import dot, html, table
from tpcompiler.report import page_data as data
from tpcompiler.report.again import advise


def artifact_dot(directory: Path, rank: int = 0) -> graphviz.Digraph:
    return dot.artifact_dot(tpcompiler.open(directory).only, rank)


def artifact_html(directory: Path, **how: Any) -> str:
    return html.artifact_html(tpcompiler.open(directory).only, **how)


def artifact_text(directory: Path, rank: int = 0) -> str:
    return table.artifact_text(tpcompiler.open(directory).only, rank)


def page_data(directory: Path, rank: int = 0, *, first: Path | None = None, **how: Any) -> dict[str, Any]:
    before = None if first is None else tpcompiler.open(first).only
    return data.page_data(tpcompiler.open(directory).only, rank, first=before, **how)


def advise_artifact(directory: Path) -> dict[str, str]:
    return advise(tpcompiler.open(directory).only)
