"""Names with which torch's Python computes something else than the graph.

`ExportedProgram.module()` writes the graph as Python and runs that. Python takes two spellings of an identifier for one
(PEP 3131: NFKC), an argument hides a global of its name, and torch binds an argument that is named like a builtin to
another name, without a look at which names the later arguments have. The judges read the graph, and would see nothing.
"""

from __future__ import annotations

import builtins
import math
import unicodedata
from collections.abc import Iterator

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

ALWAYS = {"torch", "pytree", "fx_pytree"}  # globals of whatever torch writes
RENAME = "give it a name of its own in the model, and export again"
GLOBALS = {*ALWAYS, "device", "inf", "nan"}  # the others where such a value is written


def find_unsafe_name(program: ExportedProgram) -> str:
    """What is wrong with the first name that is unsafe, or nothing."""
    graphs = [part.graph for part in program.graph_module.modules() if isinstance(part, fx.GraphModule)]
    for name in _names(program, graphs):
        for part in name.split("."):
            read = unicodedata.normalize("NFKC", part)
            if part.isidentifier() and read != part:
                return f"the name {name!r} has {part!a}, which Python reads as {read!a}"
    if both := sorted(program.state_dict.keys() & program.constants.keys()):
        return f"{both[0]!r} is in the state and in the constants"
    takes = [spec.arg.name for spec in program.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
    hidden = ALWAYS.union(*map(_globals, graphs))
    for number, name in enumerate(takes):
        # Of `input` torch makes `input_1`.
        taken = [other for other in takes[number + 1 :] if other.rpartition("_")[0] == name and other[-1].isdecimal()]
        if taken and (name in GLOBALS or hasattr(builtins, name)):
            return f"torch's Python takes the input {taken[0]!r} for the input {name!r}"
    for name in (*takes, *_arguments(program)):
        if name in hidden:
            return f"the input {name!r} hides what torch's Python means by {name!r}"
    return ""


def _names(program: ExportedProgram, graphs: list[fx.Graph]) -> Iterator[str]:
    yield from program.state_dict
    yield from program.constants
    yield from _arguments(program)
    for graph in graphs:
        for node in graph.nodes:
            yield node.name
            if node.op == "get_attr":
                yield str(node.target)


def _arguments(program: ExportedProgram) -> list[str]:
    signature = program.module_call_graph[0].signature if program.module_call_graph else None
    return list((signature.forward_arg_names if signature else None) or ())


def _globals(graph: fx.Graph) -> set[str]:
    """Those that torch writes for values among the arguments."""
    found = set()

    def look(value: object) -> object:
        if isinstance(value, torch.device):
            found.add("device")
        if isinstance(value, float) and not math.isfinite(value):
            found.add("nan" if math.isnan(value) else "inf")
        return value

    for node in graph.nodes:
        fx.node.map_aggregate((node.args, node.kwargs), look)  # type: ignore[arg-type]
    return found
