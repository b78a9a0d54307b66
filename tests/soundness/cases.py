"""The register of changes that the check must find, and what they are made with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from tests.trust.damage import Artifact

Change = Callable[[Artifact], None]
CASES: list[tuple[str, Change]] = []


def on(model: str) -> Callable[[Change], Change]:
    def register(change: Change) -> Change:
        CASES.append((model, change))
        return change

    return register


def nodes(artifact: Artifact, name: str) -> list[fx.Node]:
    """Of all ranks, by name."""
    return [next(node for node in program.graph.nodes if node.name == name) for program in artifact.ranks]


def row(artifact: Artifact, field: str, name: str) -> Any:
    return next(row for row in getattr(artifact.manifest, field) if row.name == name)
