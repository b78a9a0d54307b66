"""Tell the backward of a program with gradients from its forward."""

from __future__ import annotations

from typing import Any

from torch import fx

from tpcompiler._torch import aten, declares_view
from tpcompiler.ir import edit
from tpcompiler.ir.program import Program


def mark_backward(program: Program) -> None:
    """Mark the calls that only gradients need, in place; a program without gradients has none.

    They take their own views of leaves, so that a leaf that is gathered for the forward ends with it.
    """
    gradients = {position for position, _ in program.gradients()}
    values: Any = program.output.args[0]
    forward = set(edit.nodes_behind(value for at, value in enumerate(values) if at not in gradients))
    for node in edit.calls(program.graph) if gradients else ():
        if node not in forward:
            node.meta[edit.BACKWARD] = True
    if gradients:
        _take_views_again(program)


def _take_views_again(program: Program) -> None:
    leaves = {leaf for leaf, _ in program.leaves()}
    views = dict[fx.Node, None]()
    for node in edit.calls(program.graph):
        if not is_backward(node) and declares_view(node.target) and (node.args[0] in leaves or node.args[0] in views):
            views[node] = None
    for node in reversed(views):  # views of views first
        if users := [user for user in node.users if is_backward(user)]:
            again = edit.insert_before(min(users), node.target, node.args, node.name)  # type: ignore[arg-type]
            again.kwargs, again.meta = dict(node.kwargs), {**node.meta, edit.BACKWARD: True}
            edit.replace_uses(node, again, keep=[user for user in node.users if user not in users])


def is_backward(node: fx.Node) -> bool:
    """Return True if only gradients need a call."""
    return edit.BACKWARD in node.meta


def starts_backward(node: fx.Node) -> bool:
    """Return True for a one such as the gradient of the loss by itself, from which a backward starts."""
    return node.target is aten.full.default and node.args[:2] == ([], 1)
