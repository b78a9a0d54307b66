"""The backward of a program with gradients, drawn behind its forward as if one module made it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch.export import ExportedProgram

from tpcompiler._torch import GRADIENT_KINDS
from tpcompiler.ir import edit
from tpcompiler.views.items import Item, Module, numbered

BACKWARD = Module("backward", "backward")


def put_backward_last(items: Sequence[Item], exported: ExportedProgram) -> list[Item]:
    """Put what only gradients need behind everything else but the outputs, into a module `backward`."""
    output: Any = exported.graph.output_node().args[0]
    kinds = [spec.kind for spec in exported.graph_signature.output_specs]
    if not any(kind in GRADIENT_KINDS for kind in kinds):
        return list(items)
    own = (value for value, kind in zip(output, kinds, strict=True) if kind not in GRADIENT_KINDS)
    forward = {node.name for node in edit.ancestors(own)}
    first, backward, last = list[Item](), list[Item](), list[Item]()
    layer: tuple[Module, ...] = ()
    for item in items:
        if item.kind == "output":
            last.append(item)
        elif item.kind == "input" or item.name in forward:
            first.append(item)
        else:
            modules = item.modules or layer  # torch adds up gradients outside of modules, behind those of a layer
            numbers = [numbered(each.path)[1] for each in modules]
            layer = modules[: 1 + max((at for at, number in enumerate(numbers) if number >= 0), default=-1)]
            backward.append(replace(item, modules=(BACKWARD, *modules)))
    return [*first, *backward, *last]
