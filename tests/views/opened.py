"""Views of the artifacts in directories."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import graphviz

from tpcompiler.artifact.stored import StoredProgram
from tpcompiler.report import dot, html, table
from tpcompiler.report import page_data as data
from tpcompiler.report.again import advise


def artifact_dot(directory: Path, rank: int = 0) -> graphviz.Digraph:
    return dot.artifact_dot(StoredProgram.open(directory), rank)


def artifact_html(directory: Path, **how: Any) -> str:
    return html.artifact_html(StoredProgram.open(directory), **how)


def artifact_text(directory: Path, rank: int = 0) -> str:
    return table.artifact_text(StoredProgram.open(directory), rank)


def page_data(directory: Path, rank: int = 0, *, first: Path | None = None, **how: Any) -> dict[str, Any]:
    before = None if first is None else StoredProgram.open(first)
    return data.page_data(StoredProgram.open(directory), rank, first=before, **how)


def advise_artifact(directory: Path) -> dict[str, str]:
    return advise(StoredProgram.open(directory))
