"""Values that a graph computes from its leaves alone."""

from __future__ import annotations

from collections.abc import Set

import torch
from torch import fx

from tpcompiler._torch import OpOverload
from tpcompiler.ir import edit
from tpcompiler.ir.draws import draws


class LeafValues:
    """The values of a graph that come from leaves alone, never from an activation.

    A value made from nothing, such as the shifts that unpack eight numbers from one, counts as no activation if it
    meets a leaf element by element; in a look-up it counts as positions.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.made_of_nothing, self.drawn = set[fx.Node](), set[fx.Node]()
        for node in edit.calls(graph):
            if _made_of(node) <= self.made_of_nothing and not draws(node):
                self.made_of_nothing.add(node)
            elif self._is_made_of(node, set()):
                self.drawn.add(node)

    def of(self, leaves: Set[fx.Node]) -> Set[fx.Node]:
        """Return these leaves and every value computed from them alone, in time linear in the number of its uses."""
        static = {*leaves, *self.drawn}
        ahead = list(static)
        for value in ahead:
            for user in value.users:
                if user not in static and user.op == "call_function" and self._is_made_of(user, static):
                    static.add(user)
                    ahead.append(user)
        return static

    def _is_made_of(self, node: fx.Node, static: Set[fx.Node]) -> bool:
        if node in self.made_of_nothing:
            return False
        others = _made_of(node) - static
        return not others or (others <= self.made_of_nothing and _is_pointwise(node))


def computed_from_leaves(graph: fx.Graph, leaves: Set[fx.Node]) -> Set[fx.Node]:
    """Return the leaves and every value computed from them alone (`LeafValues`)."""
    return LeafValues(graph).of(leaves)


def _made_of(node: fx.Node) -> set[fx.Node]:
    return {value for value in node.all_input_nodes if edit.outputs(value)}  # sizes do not count


def _is_pointwise(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags
