"""Describe a model for `tpcompiler inspect`, with a starter plan."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind

from tpcompiler._torch import RETURNED_KINDS, user_inputs
from tpcompiler.api import find_plan
from tpcompiler.artifact.summary import ModelLayer, ModelSummary, ModelTensor, ModelValue
from tpcompiler.errors import TpCompilerError, one_line
from tpcompiler.frontend.plain_weights import with_plain_weights
from tpcompiler.ir import edit
from tpcompiler.ir.names import layer_of, weight_of
from tpcompiler.ir.program import Program, tied
from tpcompiler.ir.text import dtype_name
from tpcompiler.plan.plan import Plan
from tpcompiler.plan.styles import STYLES


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
    takes = user_inputs(program)
    returns = [spec for spec in program.graph_signature.output_specs if spec.kind in RETURNED_KINDS]
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    return ModelSummary(
        kind="model",
        modules=[ModelLayer(name=name, type=kind) for name, kind in modules_of(program).items()],
        parameters=parameters,
        inputs=_values([spec.arg.name for spec in takes], takes, values),
        outputs=_values(read.output_names(), returns, values),
        plan=plan_text(program, _proposed(program)),
    )


def _proposed(program: ExportedProgram) -> Plan:
    """Return the plan that the search finds for 2 ranks; all layers replicated if it finds none."""
    try:
        return find_plan(program, 2)
    except TpCompilerError:
        return Plan.of({"**": "replicate"})


def _values(names: Sequence[str], specs: Sequence[Any], values: Mapping[str, Any]) -> list[ModelValue]:
    """Describe the inputs or outputs of these specifications; `values`: the recorded ones by node."""
    return [
        ModelValue(name=name, constant=repr(spec.arg.value))
        if isinstance(spec.arg, ConstantArgument)
        else ModelValue(name=name, **_described(values[spec.arg.name]))
        for name, spec in zip(names, specs, strict=True)
    ]


def _described(value: Any) -> dict[str, Any]:
    if not isinstance(value, torch.Tensor):
        return {"number": str(value)}  # maybe symbolic
    shape = [s if isinstance(s, int) else str(s) for s in value.shape]
    return {"shape": shape, "dtype": dtype_name(value.dtype)}


EXPLAINED = ("colwise", "rowwise", "colwise_gather_output", "embedding_rowwise", "replicate")
HEAD = f"""\
# A plan: what is cut, and how. Change the styles; "replicate" leaves a layer whole on every rank.
#   colwise                cut output features: the next layer takes them cut (rowwise) or they are gathered
#   rowwise                cut input features: the results are summed over the ranks
#   colwise_gather_output  cut output features, and gather them right away
#   embedding_rowwise      cut the vocabulary of an embedding
#   auto                   of "**": the search decides what no other line names; without it that follows from the rest
# Also: {", ".join(style for style in STYLES if style not in EXPLAINED)}; for one parameter a placement, such as S(0).
"""


def plan_text(program: ExportedProgram, plan: Plan) -> str:
    """A YAML file from which `Plan.of` makes an equal plan; comments show the weights that each entry is for."""
    shapes, types = _shapes(program), modules_of(program)
    lines = []
    for entry in plan.entries:
        style = entry.style.to_data()
        names = [name for name in shapes if entry.matches(name)] if entry.pattern != "**" else []
        line = f"{json.dumps(entry.pattern)}: {style if isinstance(style, str) else json.dumps(style)}"
        lines.append((one_line(line), one_line(_comment(names, shapes, types)) if names else ""))
    width = max((len(line) for line, comment in lines if comment), default=0)
    return HEAD + "".join(f"{line:<{width}}  # {said}\n" if said else f"{line}\n" for line, said in lines)


def _comment(names: Sequence[str], shapes: Mapping[str, Sequence[str]], types: Mapping[str, str]) -> str:
    kind = types[names[0]].rpartition(".")[2] if names[0] in types else "parameter"
    others = len({tuple(shapes[name]) for name in names}) - 1
    more = f" and {others} other shape{'s' * (others > 1)}" if others else ""
    times = f", {len(names)} times" if len(names) > 1 else ""
    return f"{kind}: {', '.join(shapes[names[0]])}{more}{times}"


def _shapes(program: ExportedProgram) -> dict[str, list[str]]:
    """Every weight of two or more dims, and every module that has some: their names within it and their shapes."""
    read = Program(program, program.graph)
    first_of = tied(read)  # the plan names the first of tied ones, which places all of them
    largest: dict[str, tuple[int, str, str]] = {}  # of the parts of a weight: elements, shape, layer
    for node, spec in read.inputs():
        if spec.kind is InputKind.PARAMETER and first_of[node.name] == node.name:
            fqn, value = str(spec.target), read.state(str(spec.target))
            sized = value.numel(), str(list(value.shape)), layer_of(fqn)
            if value.ndim >= 2:
                largest[weight_of(fqn)] = max(largest.get(weight_of(fqn), sized), sized)
    found: dict[str, list[str]] = {}
    for weight, (_, shape, layer) in largest.items():
        for name in dict.fromkeys((weight, layer)):
            found.setdefault(name, []).append(f"{weight.rpartition('.')[2]} {shape}")
    return found


def modules_of(program: ExportedProgram) -> dict[str, str]:
    """Module FQN -> class, of every module that an op came from, in order of first use; nested graphs included."""
    found: dict[str, str] = {}
    for part in program.graph_module.modules():
        for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            for name, kind in (node.meta.get("nn_module_stack") or {}).values():
                if name and name != edit.NO_MODULE:
                    found.setdefault(name, kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}")
    return found
