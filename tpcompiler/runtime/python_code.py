"""Refuse programs of which the Python that torch writes could compute something else than the graph.

`ExportedProgram.module()` turns the state into attributes of a module, writes the graph as Python, and runs that; the
judges read the graph. The two can differ by names (an argument hides a global or a value of its name, Python treats two
spellings of an identifier as one, a value called `self` hides the module) and by literals (`-1 ** n`, `infj`). So names
and literals must be such that Python can read them in one way only.
"""

from __future__ import annotations

import cmath
import keyword
import operator
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from tpcompiler._torch import (
    LEAF_KINDS,
    NAMED_BY_TORCH,
    OpOverload,
    graph_modules,
    names_in_python,
    tree_flatten,
    tree_unflatten,
    user_inputs,
)
from tpcompiler.errors import reason

WRITE = "rename it in the model, or write the constant in another way, and export again"
GUARDS = "_guards_fn"  # the attribute for torch's own module of input checks
HIDING = {*NAMED_BY_TORCH, "self", "getattr"}  # what torch's Python reads by name
ATTRIBUTES = set(dir(fx.GraphModule))
PLAIN = (str, bool, int, float, complex, slice, type(None))
LITERALS = (fx.Node, torch.dtype, torch.layout, torch.memory_format, torch.device, *PLAIN)


def find_difference(program: ExportedProgram) -> str:
    """Return a reason why a program's module may differ from its graph; empty if it cannot."""
    return next(_differences(program), "")


def _differences(program: ExportedProgram) -> Iterator[str]:
    signature = program.graph_signature
    if both := sorted(program.state_dict.keys() & program.constants.keys()):
        yield f"{both[0]!r} is in the state and in the constants"
    inputs = [spec.arg.name for spec in user_inputs(program)]
    leaves = [str(spec.target) for spec in signature.input_specs if spec.kind in LEAF_KINDS]
    owners = {fqn.rpartition(".")[0] for fqn in leaves}
    words = {word for fqn in leaves for word in fqn.split(".")}
    if odd := sorted(word for word in words if not unicodedata.is_normalized("NFKC", word)):
        yield f"the name {odd[0]!r} of a module or weight is {unicodedata.normalize('NFKC', odd[0])!r} to Python"
    if owners.intersection(leaves) or not all(map(_is_attribute, words)):
        yield from _moved_state(program, leaves)
    call = program.module_call_graph[0].signature
    if call is not None:
        given, named = tree_unflatten(names_in_python(inputs), call.in_spec)
        names = call.forward_arg_names or [*(f"arg_{at}" for at in range(len(given))), *named]
        if list(names[len(given) :]) != list(named):
            yield f"its keyword arguments are {', '.join(named)}, and it names them {', '.join(names[len(given) :])}"
        yield from _hidden_names(names, [*given, *named.values()])
    for part in graph_modules(program.graph_module):
        nodes = part.graph.find_nodes(op="placeholder")
        if part is not program.graph_module:
            names = names_in_python([node.name for node in nodes])
            yield from _hidden_names([str(node.target) for node in nodes], names)
        for node in part.graph.nodes:
            yield from _misread(node)


def _hidden_names(names: Sequence[str], values: Sequence[Any]) -> Iterator[str]:
    """Yield what is wrong with the arguments of a function; `values` has the names of the graph's inputs in each."""
    for at, name in enumerate(names):
        if not _is_name(name) or name in HIDING or names.count(name) > 1:
            yield f"the argument {name!r} hides what torch's Python calls so"
        elif name in tree_flatten([*values[:at], *values[at + 1 :]])[0]:
            yield f"the argument {name!r} has the name that torch gives to another one"


def _misread(node: fx.Node) -> Iterator[str]:
    if odd := [word for word in (node.name, *node.kwargs) if not _is_name(word)] + [node.name] * (node.name in HIDING):
        yield f"the name {odd[0]!r} of a value is one that torch's Python reads otherwise"
    if node.op == "get_attr" and (node.target == GUARDS or not _is_name(str(node.target))):
        yield f"torch replaces the body {node.target!r} by another module"
    for value in tree_flatten((node.args, dict(node.kwargs)))[0]:
        if isinstance(value, complex) and not cmath.isfinite(complex(0, value.imag)):
            yield f"'{node.name}' takes the number {value!r}, which Python cannot read"
        elif not isinstance(value, LITERALS):
            yield f"'{node.name}' takes {value!r}, which torch's Python may not have"
    if node.op == "call_function" and not isinstance(node.target, OpOverload) and node.target is operator.pow:
        if isinstance(node.args[0], int | float) and node.args[0] < 0:
            yield f"'{node.name}' is {node.args[0]} ** n, which Python reads as -({-node.args[0]} ** n)"


def _is_attribute(word: str) -> bool:
    return word.isdecimal() or (_is_name(word) and word not in ATTRIBUTES)


def _is_name(word: str) -> bool:
    """Return True if Python reads a word as an identifier, and as no other one."""
    return word.isidentifier() and not keyword.iskeyword(word) and unicodedata.is_normalized("NFKC", word)


def _moved_state(program: ExportedProgram, leaves: Sequence[str]) -> Iterator[str]:
    """Yield the leaves of which the module has another tensor, under names that torch changes."""
    try:
        module = program.module()
    except Exception as error:  # Python's compiler or torch raise anything for such names
        yield f"torch cannot make a module of it: {reason(error)}"
        return
    for fqn in leaves:
        tensor, there = program.state_dict.get(fqn, program.constants.get(fqn)), operator.attrgetter(fqn)(module)
        if there is not tensor and there.untyped_storage()._cdata != tensor.untyped_storage()._cdata:
            yield f"torch puts another tensor in the place of {fqn!r}"
