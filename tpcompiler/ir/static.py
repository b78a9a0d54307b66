"""Values that a graph computes from its leaves alone."""

from __future__ import annotations

from collections.abc import Set

import torch
from torch import fx

from tpcompiler._torch import OpOverload
from tpcompiler.ir import edit
from tpcompiler.ir.draws import draws


def computed_from_leaves(graph: fx.Graph, leaves: Set[fx.Node]) -> Set[fx.Node]:
    """Return the leaves and every value computed from them alone, never an activation.

    A value made from nothing, such as the shifts that unpack eight numbers from one, counts as no activation if it
    meets a leaf element by element; in a look-up it counts as positions.
    """
    static, made_of_nothing = set(leaves), set[fx.Node]()
    for node in edit.calls(graph):
        made_of = {value for value in node.all_input_nodes if edit.outputs(value)}  # sizes do not count
        if made_of <= made_of_nothing and not draws(node):
            made_of_nothing.add(node)
        elif static >= made_of - (made_of_nothing if _is_pointwise(node) else set()):
            static.add(node)
    return static


def _is_pointwise(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags
