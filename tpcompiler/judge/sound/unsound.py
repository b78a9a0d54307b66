"""The errors of a check."""

from __future__ import annotations

from torch import fx


class Unsound(Exception):
    """A broken claim, at a node of a rank's graph."""

    def __init__(self, node: fx.Node | None, text: str) -> None:
        super().__init__(text)
        self.node = node
        self.text = text


class DoesNotRun(Unsound):
    """A region that fails to run, such as at sizes that its program is not for."""
