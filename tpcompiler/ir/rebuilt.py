"""An exported program over a changed graph."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind, InputSpec, TensorArgument

from tpcompiler._torch import LEAF_KINDS
from tpcompiler.ir.bodies import root_of
from tpcompiler.ir.local import fake_mode_of


def rebuilt(
    program: ExportedProgram,
    graph: fx.Graph,
    signature: ExportGraphSignature | None = None,
    constants: Mapping[str, torch.Tensor] | None = None,
) -> ExportedProgram:
    """The same program with another flat functional graph, and where given, another signature and other constants."""
    root = root_of(graph)
    for node in graph.nodes:
        if node.op == "get_attr":
            del node.meta["val"]
    return ExportedProgram(
        root=root,
        graph=graph,
        graph_signature=signature or copy.deepcopy(program.graph_signature),
        state_dict=dict(program.state_dict),
        range_constraints=dict(program.range_constraints),
        module_call_graph=[dataclasses.replace(e, signature=copy.copy(e.signature)) for e in program.module_call_graph],
        example_inputs=program.example_inputs,
        constants=dict(program.constants if constants is None else constants),
        verifiers=program.verifiers,
    )


def add_constant(graph: fx.Graph, signature: ExportGraphSignature, name: str, value: torch.Tensor) -> fx.Node:
    """Put a constant behind the weights, in place. Returns its placeholder."""
    behind = sum(spec.kind in LEAF_KINDS for spec in signature.input_specs)
    with graph.inserting_before(list(graph.nodes)[behind]):
        node = graph.placeholder(f"c_{name}")
    with fake_mode_of(graph):  # `from_tensor` would make symbols of its sizes
        node.meta["val"] = torch.empty(tuple(value.shape), dtype=value.dtype)
    signature.input_specs.insert(behind, InputSpec(InputKind.CONSTANT_TENSOR, TensorArgument(name=node.name), name))
    return node
