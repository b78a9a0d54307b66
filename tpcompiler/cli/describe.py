"""Describe a model for `tpcompiler inspect`, with a starter plan."""

from __future__ import annotations

from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument

from tpcompiler._torch import RETURNED_KINDS, input_values, user_inputs
from tpcompiler.api import find_plan
from tpcompiler.artifact.summary import ModelLayer, ModelSummary, ModelTensor, ModelValue
from tpcompiler.ask.plan_text import modules_of, plan_text
from tpcompiler.errors import TpCompilerError
from tpcompiler.frontend.plain_weights import with_plain_weights
from tpcompiler.ir.program import Program, tied
from tpcompiler.ir.text import dtype_name
from tpcompiler.plan.plan import Plan


def model_data(program: ExportedProgram) -> ModelSummary:
    """Return the modules, parameters, inputs, outputs and a starter plan of a single-device program."""
    program = with_plain_weights(program)
    read = Program(program, program.graph)
    kinds = {spec.target: spec.kind.name.lower() for _, spec in read.inputs()}
    names = {node.name: fqn for node, fqn in read.leaves()}
    first_of = tied(read)
    parameters = []
    for node, fqn in read.leaves():
        value = read.state(fqn)
        first, held = first_of[node.name], value.numel() * value.element_size()
        tied_to = names[first] if first != node.name else None
        parameters.append(ModelTensor(name=fqn, kind=kinds[fqn], **_described(value), bytes=held, tied_to=tied_to))
    return ModelSummary(
        kind="model",
        modules=[ModelLayer(name=name, type=kind) for name, kind in modules_of(program).items()],
        parameters=parameters,
        inputs=_inputs(program),
        outputs=_outputs(program),
        plan=plan_text(program, _proposed(program)),
    )


def _proposed(program: ExportedProgram) -> Plan:
    """Return the plan that the search finds for 2 ranks; all layers replicated if it finds none."""
    try:
        return find_plan(program, 2)
    except TpCompilerError:
        return Plan.of({"**": "replicate"})


def _inputs(program: ExportedProgram) -> list[ModelValue]:
    values = input_values(program)
    out = []
    for spec in user_inputs(program):
        if isinstance(spec.arg, ConstantArgument):
            out.append(ModelValue(name=spec.arg.name, constant=repr(spec.arg.value)))
        else:
            out.append(ModelValue(name=spec.arg.name, **_described(values[spec.arg.name])))
    return out


def _outputs(program: ExportedProgram) -> list[ModelValue]:
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    names = Program(program, program.graph).output_names()
    user = [spec for spec in program.graph_signature.output_specs if spec.kind in RETURNED_KINDS]
    out = []
    for name, spec in zip(names, user, strict=True):
        if isinstance(spec.arg, ConstantArgument):
            out.append(ModelValue(name=name, constant=repr(spec.arg.value)))
        else:
            out.append(ModelValue(name=name, **_described(values[spec.arg.name])))
    return out


def _described(value: Any) -> dict[str, Any]:
    if not isinstance(value, torch.Tensor):
        return {"number": str(value)}  # maybe symbolic
    shape = [s if isinstance(s, int) else str(s) for s in value.shape]
    return {"shape": shape, "dtype": dtype_name(value.dtype)}
