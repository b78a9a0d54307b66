"""Exported programs over a changed graph."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind, InputSpec, TensorArgument

from tpcompiler._torch import LEAF_KINDS, with_graph, with_state
from tpcompiler.ir.control_flow import root_of
from tpcompiler.ir.local import fake_mode_of


def rebuilt(
    program: ExportedProgram,
    graph: fx.Graph,
    signature: ExportGraphSignature | None = None,
    constants: Mapping[str, Any] | None = None,
    state_dict: Mapping[str, Any] | None = None,
    ranges: Mapping[Any, Any] | None = None,
) -> ExportedProgram:
    """Return the program with another flat functional graph, and with the given signature, tensors and size ranges.

    torch's constructor also writes and compiles the graph as Python; here that waits until the program runs.
    """
    root = root_of(graph)
    for node in graph.nodes:
        if node.op == "get_attr":
            node.meta.pop("val", None)
    calls = [dataclasses.replace(each, signature=copy.copy(each.signature)) for each in program.module_call_graph]
    state = dict(program.state_dict if state_dict is None else state_dict)
    constant_values = dict(program.constants if constants is None else constants)
    copied = with_state(with_graph(program, root, graph), state, constant_values, calls, program.example_inputs)
    copied._graph_signature = signature or copy_signature(program.graph_signature)
    if ranges is not None:
        copied._range_constraints = dict(ranges)
    return copied


def copy_signature(signature: ExportGraphSignature) -> ExportGraphSignature:
    """Return a signature whose entries can be changed. `copy.deepcopy` takes ten times as long."""
    specs = ([_copy_spec(spec) for spec in each] for each in (signature.input_specs, signature.output_specs))
    return ExportGraphSignature(*specs)


def _copy_spec(spec: Any) -> Any:
    copied = copy.copy(spec)
    copied.arg = copy.copy(spec.arg)
    return copied


def add_constant(graph: fx.Graph, signature: ExportGraphSignature, name: str, value: torch.Tensor) -> fx.Node:
    """Insert a constant after the weights, in place. Return its placeholder."""
    behind = sum(spec.kind in LEAF_KINDS for spec in signature.input_specs)
    with graph.inserting_before(list(graph.nodes)[behind]):
        node = graph.placeholder(f"c_{name}")
    with fake_mode_of(graph):  # `from_tensor` would create symbols for its sizes
        node.meta["val"] = torch.empty(tuple(value.shape), dtype=value.dtype)
    signature.input_specs.insert(behind, InputSpec(InputKind.CONSTANT_TENSOR, TensorArgument(name=node.name), name))
    return node
