"""Print programs: tests, dumps and errors show this text form."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from tpcompiler._torch import OpOverload
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.node_placement import PLACEMENT, NodePlacement
from tpcompiler.ir.program import PIN, PlannedProgram, Program
from tpcompiler.runtime import records

DTYPES = {getattr(torch, name): short for name, short in records.DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype as manifests have it, such as `f32`."""
    return DTYPES.get(dtype, str(dtype))


def program_text(program: Program) -> str:
    """Print one line per node: `name: sharding = op(operands)`; `P(sum) -> R` if a value is reduced right after."""
    mesh: Mesh | None = getattr(program, "mesh", None)
    planned = program if isinstance(program, PlannedProgram) else None
    names = {node.name: fqn for node, fqn in program.leaves()}
    lines = []
    for node in program.graph.nodes:
        label = _sharding(node, mesh)
        if node.op == "placeholder":
            if planned and node.name in names and (asked := planned.fixed(node)):
                label = f": {asked.sharding.text(planned.mesh)}"
            kind = names.get(node.name, "input")
            lines.append(f"{node.name}{label} = {kind} {value_text(node.meta.get('val'))}")
        elif node.op == "output":
            lines.append(f"return {', '.join(_argument(a) for a in node.args[0])}")
        else:
            arguments = [_argument(a) for a in node.args] + [f"{k}={_argument(v)}" for k, v in node.kwargs.items()]
            lines.append(f"{node.name}{label} = {op_name(node)}({', '.join(arguments)})")
    return "\n".join(lines) + "\n"


def op_name(node: fx.Node) -> str:
    """Return the op's name without namespace and overload: `linear`, `all_reduce`, `getitem`."""
    if isinstance(node.target, OpOverload):
        return str(node.target._schema.name.split("::")[1])
    return "getitem" if node.target is operator.getitem else getattr(node.target, "__name__", str(node.target))


def value_text(value: Any) -> str:
    """Return `f32[2, s0]` for a tensor, the repr of anything else."""
    if isinstance(value, torch.Tensor):
        return f"{dtype_name(value.dtype)}[{', '.join(str(s) for s in value.shape)}]"
    return repr(value)


def _sharding(node: fx.Node, mesh: Mesh | None) -> str:
    mark: NodePlacement | None = node.meta.get(PLACEMENT)
    if mesh is None:
        return ""
    if mark is None:
        return f": {node.meta[PIN].sharding.text(mesh)}" if PIN in node.meta else ""
    if not mark.shardings:
        return ""
    texts = [sharding.text(mesh) for sharding in mark.shardings]
    return f": {texts[0]}" if len(texts) == 1 else f": ({', '.join(texts)})"


def _argument(argument: Any) -> str:
    if isinstance(argument, fx.Node):
        return argument.name
    if isinstance(argument, (list, tuple)):
        return f"[{', '.join(_argument(a) for a in argument)}]"
    return repr(argument) if not isinstance(argument, torch.dtype) else dtype_name(argument)
