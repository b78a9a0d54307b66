"""Values written back at the end of a program, and the results that this would overwrite.

A functional program returns the new values of its buffers, and reads only their old values. torch's module copies the
new values into the buffers one after another, and then returns: a result that shares memory with a buffer changes on
the way. torch's functional form of `previous.copy_(current); current.copy_(x)` has such a result, so its module is
wrong.

torch functionalises writes to views by the aliases that op schemas declare. Some ops declare none and still may return
their operand's memory: `einsum("ij->ji")`, dropout that drops nothing, `type_as` of the same type. A write to such a
result, or to its operand, would be lost unless these ops are decomposed.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind, TensorArgument

from tpcompiler._torch import (
    RETURNED_KINDS,
    WRITTEN_KINDS,
    HigherOrderOperator,
    OpOverload,
    aten,
    calls_others,
    declares_view,
    graph_modules,
    sym_hint,
    tree_flatten,
)
from tpcompiler.ir import edit
from tpcompiler.ir.local import insert_call

# Ops that return views without declaring it, and the equivalent ops that declare it.
VIEWS = {
    aten._unsafe_view.default: aten.view.default,
    aten.unsafe_split.Tensor: aten.split.Tensor,
    aten.unsafe_split_with_sizes.default: aten.split_with_sizes.default,
    aten.unsafe_chunk.default: aten.chunk.default,
    aten.lift.default: aten.alias.default,
}
# Kernels that may return their operand's memory without declaring it, among all of torch's, as
# tests/frontend/test_hidden_views.py finds. For composite ops the kernel is run instead.
UNDECLARED = {*VIEWS, aten.native_dropout.default}
STATISTICS = ("running_mean", "running_var")  # operands of norms


def find_hidden_views(program: ExportedProgram) -> set[OpOverload]:
    """Return the composite ops whose result shares undeclared memory with an operand, if any call writes in place."""
    calls = [node for each in graph_modules(program.graph_module) for node in edit.calls(each.graph)]
    if not any(map(writes, calls)):
        return set()
    ops = [(node, node.target) for node in calls if isinstance(node.target, OpOverload)]
    return {op for node, op in ops if calls_others(op) and _hidden_base(node) is not None}


def find_written(program: ExportedProgram) -> set[str]:
    """Return the leaves (by name) and user inputs (by node name) whose memory a call may write."""
    names = {
        node: str(node.name if spec.kind is InputKind.USER_INPUT else spec.target)
        for node, spec in edit.placeholders(program)
    }
    calls = list(edit.calls(program.graph))
    operands_written = [value for node in calls for value in _written_operands(node)]
    with_bodies = [node for node in calls if isinstance(node.target, HigherOrderOperator)]
    if with_bodies and any(
        writes(node) for each in graph_modules(program.graph_module) for node in edit.calls(each.graph)
    ):
        operands_written += [operand for node in with_bodies for operand in edit.operands(node)]
    owners = set(map(memory_of, operands_written))
    return {name for node, name in names.items() if node in owners}


def _written_operands(node: fx.Node) -> list[fx.Node]:
    """Return the operands that a call may change."""
    if not isinstance(node.target, OpOverload):
        return []
    declared = [each.name for each in node.target._schema.arguments if each.alias_info and each.alias_info.is_write]
    arguments, names = edit.bound(node), [*declared, *(STATISTICS if updates_statistics(node) else ())]
    values, _ = tree_flatten([arguments.get(name) for name in names])
    return [value for value in values if isinstance(value, fx.Node)]


def writes(node: fx.Node) -> bool:
    """Return True if a call's schema declares that it mutates an operand."""
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def updates_statistics(node: fx.Node) -> bool:
    """Return True if a norm updates its statistics, in training, which its schema does not declare."""
    if not isinstance(node.target, OpOverload) or "_norm" not in str(node.target):
        return False
    arguments = edit.bound(node)
    return any(arguments.get(name) is True for name in ("training", "train", "use_input_stats"))


def find_overwritten(program: ExportedProgram) -> Iterator[tuple[int, fx.Node, str]]:
    """Yield (output position, value, name of the buffer or input) for outputs in memory that is written first."""
    goes_to = _written(program)
    if not any(goes_to):
        return
    values: Any = program.graph.output_node().args[0]
    memory = [memory_of(value) if isinstance(value, fx.Node) else None for value in values]
    for position, (value, owner, shared) in enumerate(zip(values, goes_to, memory, strict=True)):
        if shared is not None and shared in goes_to and not value is shared is owner:
            yield position, value, str(program.graph_signature.output_specs[goes_to.index(shared)].target)


def _written(program: ExportedProgram) -> list[fx.Node | None]:
    """Return the placeholder that each output is written back to; None for user outputs."""
    owners = {
        (spec.kind is InputKind.USER_INPUT, spec.target or spec.arg.name): node
        for node, spec in edit.placeholders(program)
    }
    specs = program.graph_signature.output_specs
    return [
        owners.get((spec.kind is OutputKind.USER_INPUT_MUTATION, spec.target)) if spec.kind in WRITTEN_KINDS else None
        for spec in specs
    ]


def keep_old_values(program: ExportedProgram) -> ExportedProgram:
    """Clone values that would be overwritten, in the program itself."""
    for position, value, _ in list(find_overwritten(program)):
        _return(program, position, _clone(program, value, f"old_{value.name}"))
    program.graph_module.recompile()
    return program


def keep_results(program: ExportedProgram, exported: ExportedProgram) -> ExportedProgram:
    """Clone old values, and values that are written back and returned or written back twice, in the program itself.

    torch's module returns the buffer for a value that it has copied there, so the next call would change what the
    caller keeps. A result that is the buffer in the exported program stays the buffer. And torch's signature knows one
    buffer for each value that is written back.
    """
    owners, before = _written(program), _values(program)
    keep_old_values(program)
    returned = [at for at, spec in enumerate(program.graph_signature.output_specs) if spec.kind in RETURNED_KINDS]
    given = {before[at] for at in returned}
    written: dict[str, int] = {}  # where a buffer's new value is, by its placeholder's name
    new = set[fx.Node]()
    for at, (value, owner) in enumerate(zip(_values(program), owners, strict=True)):
        if owner is None or value is owner:
            continue
        own = value
        if value in new or (value in given and memory_of(value).op == "placeholder"):
            own = _clone(program, value, f"{value.name}_of_{owner.name}")
            _return(program, at, own)
        written[owner.name] = at
        new.add(own)
    clones: dict[fx.Node, fx.Node] = {}
    memory = _returned_memory(exported)
    if len(memory) != len(returned):  # torch writes a subclass as its plain tensors
        memory = [""] * len(returned)
    for at, shared in zip(returned, memory, strict=True):
        value, own = _values(program)[at], written.get(shared)
        if own is not None and before[own] is before[at]:
            _return(program, at, _values(program)[own])
        elif value in new:
            if value not in clones:
                clones[value] = _clone(program, value, f"{value.name}_returned")
            _return(program, at, clones[value])
    program.graph_module.recompile()
    return program


def _values(program: ExportedProgram) -> list[Any]:
    return list(program.graph.output_node().args[0])


def _returned_memory(program: ExportedProgram) -> list[str]:
    """Return the name of the value that owns the memory of each of the user's outputs; empty for numbers."""
    values: Any = program.graph.output_node().args[0]
    pairs = zip(program.graph_signature.output_specs, values, strict=True)
    returned = [value for spec, value in pairs if spec.kind in RETURNED_KINDS]
    return [memory_of(value).name if isinstance(value, fx.Node) else "" for value in returned]


def _clone(program: ExportedProgram, value: fx.Node, name: str) -> fx.Node:
    return insert_call(program.graph.output_node(), aten.clone.default, (value,), name)


def _return(program: ExportedProgram, position: int, value: fx.Node) -> None:
    """Return another value at a position of the output, the values that are written back included."""
    output = program.graph.output_node()
    values: Any = output.args[0]
    output.args = ((*values[:position], value, *values[position + 1 :]),)
    program.graph_signature.output_specs[position].arg = TensorArgument(name=value.name)


def memory_of(value: fx.Node) -> fx.Node:
    """Return the value that owns this one's memory: itself, unless it is a view."""
    while value.op == "call_function":
        if isinstance(value.target, OpOverload):
            if declares_view(value.target) or edit.is_wait(value) or value.target in UNDECLARED:
                base = next(iter(edit.bound(value).values()))
            else:
                base = _hidden_base(value) if calls_others(value.target) else None
        elif value.target is operator.getitem:
            base = value.args[0]
        else:
            break
        if not isinstance(base, fx.Node):
            break
        value = base
    return value


def _hidden_base(node: fx.Node) -> fx.Node | None:
    return next(iter(hidden_bases(node)), None)


def hidden_bases(node: fx.Node) -> list[fx.Node]:
    """Return the operands that share memory with a call's results although its schema does not declare it.

    The op's kernel is run on tensors without memory, with the example's sizes.
    """
    if declares_view(node.target) or not isinstance(node.target, OpOverload):
        return []
    try:
        operands = {each: without_memory(edit.fake(each)) for each in edit.operands(node)}
        args, kwargs = fx.node.map_arg(
            (node.args, node.kwargs),
            lambda each: operands[each] if each in operands else _example(each.meta.get("val")),
        )
        with torch.no_grad():
            results, _ = tree_flatten(node.target(*args, **kwargs))
    except RuntimeError:  # an op that cannot run on sizes alone returns fresh memory
        return []
    memory = {_memory(value) for value in results if isinstance(value, torch.Tensor)}
    return [each for each, value in operands.items() if _memory(value) in memory]


def without_memory(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same layout on the meta device, with the example's sizes."""
    sizes, strides = (list(map(_example, each)) for each in (value.shape, value.stride()))
    return torch.empty_strided(sizes, strides, dtype=value.dtype, device="meta")


def _example(value: Any) -> Any:
    return sym_hint(value) if isinstance(value, torch.SymInt) else value


def _memory(value: torch.Tensor) -> int:
    pointer: int = value.untyped_storage()._cdata
    return pointer
