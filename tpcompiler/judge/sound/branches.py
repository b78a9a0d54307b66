"""Expand the model's branches that the ranks compute on both sides."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from tpcompiler._torch import aten
from tpcompiler.ir import edit
from tpcompiler.ir.bodies import is_cond, read_bodies
from tpcompiler.ir.program import BOTH, CanonicalProgram
from tpcompiler.judge.sound.unsound import Unsound
from tpcompiler.rules.index_range import Ranges, door_ranges
from tpcompiler.rules.unguarded import obstacle


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
    graph, copies = cond.graph, list[fx.Node]()
    predicate, true, false, operands = cond.args
    with graph.inserting_before(cond):
        results = [_copied(cond, branch, operands, copies) for branch in ((true, "true"), (false, "false"))]
        if why := obstacle(copies, at_door):
            raise Unsound(None, f"the ranks compute both branches of '{cond.name}', and one of them {why}")
        value: Any = predicate.meta.get("val")  # type: ignore[union-attr]
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
            ends = tuple(result[index] for result in results)
            name = f"{cond.name}_chosen_{index}"
            chosen = graph.create_node("call_function", aten.where.self, (predicate, *ends), name=name)
            chosen.meta.update({"val": part.meta.get("val"), BOTH: cond.name})
            edit.replace_uses(part, chosen)
            edit.erase(part)
    edit.erase(cond)
    return copies


def _copied(cond: fx.Node, branch: tuple[Any, str], operands: Any, copies: list[fx.Node]) -> Any:
    """Copy a branch before the call, and return its results."""
    body, side = edit.fake(branch[0]), branch[1]
    inner_graph = edit.copy_graph(body.graph)
    read_bodies(inner_graph, body)
    inputs = (node for node in inner_graph.nodes if node.op == "placeholder")
    env: dict[fx.Node, Any] = dict(zip(inputs, operands, strict=True))
    for node in inner_graph.nodes:
        if node.op == "output":
            return fx.node.map_arg(node.args[0], lambda used: env[used])
        if node not in env:
            args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda used: env[used])
            name = f"{cond.name}_{side}_{node.name}"
            env[node] = cond.graph.create_node(node.op, node.target, args, kwargs, name=name)
            env[node].meta.update(node.meta)
            copies.append(env[node])
    raise Unsound(None, f"a branch of '{cond.name}' returns nothing")
