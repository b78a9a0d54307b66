"""Damage a rank's program on purpose: the checks must notice."""

from __future__ import annotations

import copy

import torch
from torch import fx
from torch.export import ExportedProgram

from tpcompiler.ir.buckets import BUCKET
from tpcompiler.ir.edit import is_collective

aten = torch.ops.aten


def collectives_of(program: ExportedProgram) -> list[str]:
    return [node.name for node in program.graph.nodes if is_collective(node)]


def without_collective(program: ExportedProgram, name: str) -> ExportedProgram:
    """The program with one collective replaced by local ops of the same shape that communicate nothing."""
    damaged = copy.deepcopy(program)
    for node in list(damaged.graph.nodes):
        if node.name == name:
            for made in list(node.users) if node.target is BUCKET else [node]:
                value = node.args[0][made.args[1]] if made is not node else node.all_input_nodes[0]
                with damaged.graph.inserting_before(made):
                    local = local_stand_in(damaged.graph, made, value)
                made.replace_all_uses_with(local)
                damaged.graph.erase_node(made)
            if node.target is BUCKET:
                damaged.graph.erase_node(node)
    return damaged


def local_stand_in(graph: fx.Graph, node: fx.Node, value: fx.Node) -> fx.Node:
    """What this rank has itself, repeated along dim 0 and cut off where the collective's result ends."""
    had, made = value.meta["val"].shape[0] if value.meta["val"].ndim else 1, node.meta["val"].shape
    if node.meta["val"].shape == value.meta["val"].shape:
        return graph.call_function(aten.clone.default, (value,))
    repeated = graph.call_function(aten.cat.default, ([value] * max(1, -(-made[0] // had)),))
    return graph.call_function(aten.slice.Tensor, (repeated, 0, 0, made[0]))
