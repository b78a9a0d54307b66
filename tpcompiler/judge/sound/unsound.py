"""What a check raises."""

from __future__ import annotations

from torch import fx


class Unsound(Exception):
    """What does not hold, at which node of a rank's graph."""

    def __init__(self, node: fx.Node | None, text: str) -> None:
        super().__init__(text)
        self.node = node
        self.text = text


class DoesNotRun(Unsound):
    """A region that fails before it has made anything, as of sizes that its program is not for."""
