"""Numbers for the values of several graphs: equal ops on equal values have equal numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import fx

from tpcompiler._torch import OpOverload
from tpcompiler.ir import edit
from tpcompiler.ir.sizes import statically_equal

# Arguments that depend on the machine, and the text of an assertion, which names symbols and lines.
OF_THE_PLACE = ("device", "pin_memory", "layout", "assert_msg")
Known = dict[fx.Node, int]


class Numbering:
    """One numbering of all values of some graphs.

    Args:
        drawn: the place of each op that draws random numbers among those of its graph: equal draws are not equal
            values.
        sizes_by_value: a size has the number of its value, not of its computation; the graphs share their symbols.
    """

    def __init__(self, drawn: Mapping[fx.Node, int] | None = None, *, sizes_by_value: bool = False) -> None:
        self.drawn = drawn or {}
        self.numbers: dict[Hashable, int] = {}
        self.sizes_by_value, self.sizes = sizes_by_value, list[Any]()

    def number(self, *what: Hashable) -> int:
        return self.numbers.setdefault(what, len(self.numbers))

    def of(self, node: fx.Node, known: Known) -> int:
        """Return the number of a node, and put it and those of its operands into `known`."""
        value = node.meta.get("val")
        if self.sizes_by_value and isinstance(value, (int, float, torch.SymInt)) and type(value) is not bool:
            known[node] = self.number(*self._size(value))
        elif node not in known and node.op in ("placeholder", "get_attr"):
            known[node] = self.number(node.op, node.name if node.op == "placeholder" else body_text(node))
        elif node not in known:
            head, arguments = call_of(node)
            operands = key_of(arguments, lambda used: ("node", self.of(used, known)))
            known[node] = self.number(head, operands, self.drawn.get(node, 0))
        return known[node]

    def _size(self, value: Any) -> tuple[Hashable, ...]:
        """Return a key that is equal for sizes that are equal in every run; literals are their own key."""
        if not isinstance(value, torch.SymInt):
            return type(value).__name__, repr(value)
        for at, other in enumerate(self.sizes):
            if statically_equal(value, other):
                return "size", at
        self.sizes.append(value)
        return "size", len(self.sizes) - 1


def key_of(value: Any, of: Callable[[fx.Node], Hashable]) -> Hashable:
    """Return a key that is equal for equal arguments: `of` each node, and constants; devices may differ.

    It separates -0.0 from 0.0 and 1 from True, and equates NaNs.
    """
    if isinstance(value, fx.Node):
        return of(value)
    if isinstance(value, (list, tuple)):
        return tuple(key_of(each, of) for each in value)
    return type(value).__name__, "" if isinstance(value, torch.device) else repr(value)


def call_of(node: fx.Node) -> tuple[str, list[Any]]:
    """Return the op and its arguments, with defaults filled in and machine-dependent ones left out."""
    if not isinstance(node.target, OpOverload):
        return str(node.target), [*node.args, *node.kwargs.items()]
    bound = edit.bound(node)
    if node.target in edit.VIEWS:
        return "view", list(bound.values())
    return str(node.target), [(name, value) for name, value in bound.items() if name not in OF_THE_PLACE]


def body_text(node: fx.Node) -> str:
    """Return a hash of a body of control flow."""
    named = edit.fake(node).named_modules()
    parts = [f"{name}: {part.graph}" for name, part in named if isinstance(part, fx.GraphModule)]
    return f"body {hashlib.sha256(chr(10).join(parts).encode()).hexdigest()[:12]}"
