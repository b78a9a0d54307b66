"""An exported program over a changed graph."""

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
from tpcompiler.ir.bodies import root_of
from tpcompiler.ir.local import fake_mode_of


def rebuilt(
    program: ExportedProgram,
    graph: fx.Graph,
    signature: ExportGraphSignature | None = None,
    constants: Mapping[str, Any] | None = None,
    state_dict: Mapping[str, Any] | None = None,
    ranges: Mapping[Any, Any] | None = None,
) -> ExportedProgram:
    """The same program with another flat functional graph, and where given, another signature, other tensors and sizes.

    What torch's constructor would do besides, which is to write and compile the graph as Python, waits until it is run.
    """
    root = root_of(graph)
    for node in graph.nodes:
        if node.op == "get_attr":
            node.meta.pop("val", None)
    calls = [dataclasses.replace(each, signature=copy.copy(each.signature)) for each in program.module_call_graph]
    state = dict(program.state_dict if state_dict is None else state_dict)
    held = dict(program.constants if constants is None else constants)
    made = with_state(with_graph(program, root, graph), state, held, calls, program.example_inputs)
    made._graph_signature = signature or copy_signature(program.graph_signature)
    if ranges is not None:
        made._range_constraints = dict(ranges)
    return made


def copy_signature(signature: ExportGraphSignature) -> ExportGraphSignature:
    """One whose entries can be changed. `copy.deepcopy` takes ten times as long."""
    specs = ([_copy_spec(spec) for spec in each] for each in (signature.input_specs, signature.output_specs))
    return ExportGraphSignature(*specs)


def _copy_spec(spec: Any) -> Any:
    made = copy.copy(spec)
    made.arg = copy.copy(spec.arg)
    return made


def add_constant(graph: fx.Graph, signature: ExportGraphSignature, name: str, value: torch.Tensor) -> fx.Node:
    """Put a constant behind the weights, in place. Returns its placeholder."""
    behind = sum(spec.kind in LEAF_KINDS for spec in signature.input_specs)
    with graph.inserting_before(list(graph.nodes)[behind]):
        node = graph.placeholder(f"c_{name}")
    with fake_mode_of(graph):  # `from_tensor` would make symbols of its sizes
        node.meta["val"] = torch.empty(tuple(value.shape), dtype=value.dtype)
    signature.input_specs.insert(behind, InputSpec(InputKind.CONSTANT_TENSOR, TensorArgument(name=node.name), name))
    return node
