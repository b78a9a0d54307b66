"""Tell the backward of a program with gradients from its forward."""

from __future__ import annotations

from typing import Any

from torch import fx

from tpcompiler.ir import edit
from tpcompiler.ir.program import Program


def mark_backward(program: Program) -> None:
    """Mark the calls that only gradients need, in place; a program without gradients has none."""
    gradients = {position for position, _ in program.gradients()}
    values: Any = program.output.args[0]
    forward, ahead = set[fx.Node](), [value for at, value in enumerate(values) if at not in gradients]
    while ahead:
        value = ahead.pop()
        if isinstance(value, fx.Node) and value not in forward:
            forward.add(value)
            ahead += value.all_input_nodes
    for node in edit.calls(program.graph) if gradients else ():
        if node not in forward:
            node.meta[edit.BACKWARD] = True


def is_backward(node: fx.Node) -> bool:
    """Return True if only gradients need a call."""
    return edit.BACKWARD in node.meta
