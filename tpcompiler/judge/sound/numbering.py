"""Numbers for the values of several graphs: equal ops on equal values have equal numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable
from typing import Any

import torch
from torch import fx

from tpcompiler._torch import OpOverload
from tpcompiler.ir import edit
from tpcompiler.ir.draws import draws
from tpcompiler.ir.sizes import statically_equal

# Arguments that depend on the machine, and the text of an assertion, which names symbols and lines.
OF_THE_PLACE = ("device", "pin_memory", "layout", "assert_msg")
Known = dict[fx.Node, int]


class Numbering:
    """One numbering of all values of some graphs.

    `sizes_by_value`: a size has the number of its value, not of its computation; the graphs share their symbols.
    """

    def __init__(self, *, sizes_by_value: bool = False) -> None:
        self.numbers: dict[Hashable, int] = {}
        self.sizes_by_value, self.sizes = sizes_by_value, list[Any]()

    def number(self, *what: Hashable) -> int:
        return self.numbers.setdefault(what, len(self.numbers))

    def of(self, node: fx.Node, known: Known, drawn: int = 0) -> int:
        """Return the number of a node, and put it and those of its operands into `known`.

        `drawn`: the number of ops before it that draw random numbers: equal draws are not equal values.
        """
        if node not in known:
            value = node.meta.get("val")
            if node.op in ("placeholder", "get_attr"):
                known[node] = self.number(node.op, node.name if node.op == "placeholder" else body_text(node))
            elif self.sizes_by_value and isinstance(value, (int, float, torch.SymInt)) and type(value) is not bool:
                known[node] = self.number(*self._size(value))
            else:
                head, arguments = call_of(node)
                drawn = drawn if node.op == "call_function" and draws(node) else 0
                known[node] = self.number(head, self._text(arguments, known), drawn)
        return known[node]

    def _text(self, value: Any, known: Known) -> Hashable:
        if isinstance(value, fx.Node):
            size = value.meta.get("val")
            is_size = self.sizes_by_value and isinstance(size, torch.SymInt)
            return self._size(size) if is_size else ("node", self.of(value, known))
        if isinstance(value, (list, tuple)):
            return tuple(self._text(each, known) for each in value)
        return type(value).__name__, repr(value)

    def _size(self, value: Any) -> tuple[Hashable, ...]:
        """Return a key that is equal for sizes that are equal in every run; literals are their own key."""
        if not isinstance(value, torch.SymInt):
            return type(value).__name__, repr(value)
        for at, other in enumerate(self.sizes):
            if statically_equal(value, other):
                return "size", at
        self.sizes.append(value)
        return "size", len(self.sizes) - 1


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
