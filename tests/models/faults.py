"""Damage a rank's program on purpose: the checks must notice."""

from __future__ import annotations

import copy

import torch
from torch.export import ExportedProgram

from tpcompiler.ir.edit import is_collective


def collectives_of(program: ExportedProgram) -> list[str]:
    return [node.name for node in program.graph.nodes if is_collective(node)]


def without_collective(program: ExportedProgram, name: str) -> ExportedProgram:
    """The program with one collective replaced by a local op of the same shape that communicates nothing."""
    damaged = copy.deepcopy(program)
    for node in list(damaged.graph.nodes):
        if node.name == name:
            (value,) = node.all_input_nodes
            kind = str(node.target).split(".")[1]
            with damaged.graph.inserting_before(node):
                if kind == "all_gather_into_tensor":
                    local = damaged.graph.call_function(torch.ops.aten.cat.default, ([value] * node.args[1],))
                else:
                    assert kind == "all_reduce", kind
                    local = damaged.graph.call_function(torch.ops.aten.clone.default, (value,))
            node.replace_all_uses_with(local)
            damaged.graph.erase_node(node)
    return damaged
