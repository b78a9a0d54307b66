"""What is written back when a program ends, and what that overwrites.

A functional program returns the new values of its buffers; what it reads of them is of before. torch's module copies
the new values into the buffers one after another, and then returns: a result that lies in the memory of a buffer
changes on the way. torch's functional form of `previous.copy_(current); current.copy_(x)` has such a result, and its
module is wrong.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind, TensorArgument

from tpcompiler._torch import OpOverload, aten
from tpcompiler.ir import edit

# Ops that may give back the memory they take, and whose schemas do not say so.
UNSAID = {aten._unsafe_view.default, aten.native_dropout.default, aten.dropout.default, aten.type_as.default}


def find_overwritten(program: ExportedProgram) -> Iterator[tuple[int, fx.Node, str]]:
    """(position among the outputs, value, name of the buffer or input) of each that lies in what is written first."""
    signature = program.graph_signature
    placeholders = program.graph.find_nodes(op="placeholder")
    owners = {
        (spec.kind is InputKind.USER_INPUT, spec.target or spec.arg.name): node
        for node, spec in zip(placeholders, signature.input_specs, strict=True)
    }
    goes_to = [
        owners.get((spec.kind is OutputKind.USER_INPUT_MUTATION, spec.target))
        for spec in signature.output_specs  # of what the user gets, nothing
    ]
    values: Any = program.graph.output_node().args[0]
    for position, (value, owner) in enumerate(zip(values, goes_to, strict=True)):
        lies_in = memory_of(value) if isinstance(value, fx.Node) else None
        if lies_in is not None and lies_in in goes_to and not value is lies_in is owner:
            yield position, value, str(signature.output_specs[goes_to.index(lies_in)].target)


def keep_old_values(program: ExportedProgram) -> ExportedProgram:
    """Clone what would be overwritten, in the program itself."""
    output = program.graph.output_node()
    for position, value, _ in list(find_overwritten(program)):
        kept = edit.insert_before(output, aten.clone.default, (value,), f"old_{value.name}")
        kept.meta["val"] = torch.clone(value.meta["val"])
        values: Any = output.args[0]
        output.args = ((*values[:position], kept, *values[position + 1 :]),)
        program.graph_signature.output_specs[position].arg = TensorArgument(name=kept.name)
    program.graph_module.recompile()
    return program


def memory_of(value: fx.Node) -> fx.Node:
    """The value in whose memory this one lies: itself, unless it is a view."""
    while value.op == "call_function":
        if isinstance(value.target, OpOverload):
            shares = any(made.alias_info is not None for made in value.target._schema.returns)
            if not (shares or edit.is_wait(value) or value.target in UNSAID):
                break
            base = next(iter(edit.bound(value).values()))
        elif value.target is operator.getitem:
            base = value.args[0]
        else:
            break
        if not isinstance(base, fx.Node):
            break
        value = base
    return value
