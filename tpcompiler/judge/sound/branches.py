"""Expand the model's branches that the ranks compute on both sides."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, cast

import torch
from torch import fx

from tpcompiler._torch import aten
from tpcompiler.ir import edit
from tpcompiler.ir.control_flow import copy_body, is_cond
from tpcompiler.ir.program import BOTH, CanonicalProgram
from tpcompiler.judge.sound.unsound import Unsound
from tpcompiler.rules.index_range import Ranges, door_ranges
from tpcompiler.rules.speculation import obstacle


def with_both_branches(model: CanonicalProgram, called: Collection[str]) -> CanonicalProgram:
    """Expand every cond that the ranks do not call: both branches, and a choice by the predicate for each result.

    So the comparison holds for both values of the predicate. `called`: the names of the conds that the ranks call.

    Raises:
        Unsound: a branch may only run if it is chosen.
    """
    if all(node.name in called for node in edit.calls(model.graph) if is_cond(node)):
        return model
    graph = edit.copy_graph(model.graph)
    at_door = door_ranges(model, {})
    waiting = list(edit.calls(graph))
    for node in waiting:
        if is_cond(node) and node.name not in called:
            waiting += _write_out(node, at_door)
    return CanonicalProgram(model.source, graph)


def _write_out(cond: fx.Node, at_door: Ranges) -> list[fx.Node]:
    graph = cond.graph
    predicate, true, false, operands = cast(Any, cond.args)
    on_true, on_false = (copy_body(cond, side, body, operands) for side, body in (("true", true), ("false", false)))
    copies = on_true[0] + on_false[0]
    with graph.inserting_before(cond):
        if why := obstacle(copies, at_door):
            raise Unsound(None, f"the ranks compute both branches of '{cond.name}', and one of them {why}")
        value: Any = predicate.meta.get("val")
        if isinstance(value, torch.Tensor) and value.dtype != torch.bool:
            predicate = graph.create_node(
                "call_function", aten.ne.Scalar, (predicate, 0), name=f"{cond.name}_predicate"
            )
        if isinstance(value, torch.Tensor) and value.ndim:
            predicate = graph.create_node(
                "call_function", aten.view.default, (predicate, []), name=f"{cond.name}_predicate"
            )
        for part in list(cond.users):
            index: Any = part.args[1]
            ends = on_true[1][index], on_false[1][index]
            name = f"{cond.name}_chosen_{index}"
            chosen = graph.create_node("call_function", aten.where.self, (predicate, *ends), name=name)
            chosen.meta.update({"val": part.meta.get("val"), BOTH: cond.name})
            edit.replace_uses(part, chosen)
            edit.erase(part)
    edit.erase(cond)
    return copies
