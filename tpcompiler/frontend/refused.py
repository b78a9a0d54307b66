"""Refuse programs that the compiler does not support."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import CustomObjArgument, InputKind, InputSpec, OutputKind

from tpcompiler._torch import LEAF_KINDS, WRITTEN_KINDS, FakeTensor, HigherOrderOperator, OpOverload, user_inputs
from tpcompiler.errors import ProgramError, UnsupportedError
from tpcompiler.ir import edit
from tpcompiler.ir.control_flow import all_calls, has_bodies
from tpcompiler.ir.text import value_text
from tpcompiler.runtime.python_code import WRITE, find_difference
from tpcompiler.runtime.weightless import weightless_names

QUANTISED = (torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4)


def refuse_others(program: object) -> None:
    """Check that `program` is an exported program.

    Raises:
        ProgramError: any other object.
    """
    if not isinstance(program, ExportedProgram):
        raise ProgramError(
            f"{type(program).__qualname__} is not an exported program", help="pass what torch.export.export returned"
        )


def refuse_values(program: ExportedProgram) -> None:
    """Check a program's state and kinds of tensors before torch works on it.

    Raises:
        ProgramError: the state does not match the graph, or torch's Python form of the program would compute something
            else.
        UnsupportedError: sparse or quantised tensors, or tensor subclasses as inputs.
    """
    refuse_objects(program)
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    inputs = {spec.arg.name for spec in user_inputs(program)}
    for node in program.graph.nodes:
        for value in edit.outputs(node) if node.op in ("placeholder", "call_function") else ():
            kind = _other_than_dense(node, value, is_input=node.name in inputs)
            if kind:
                raise UnsupportedError(
                    f"{_named(node, specs)} is {kind}, which cannot be sharded yet",
                    help="export the model with plain dense tensors",
                    used_at=edit.source_line(node),
                )
        if node.op == "placeholder" and specs[node.name].kind in LEAF_KINDS:
            _check_state(node, specs[node.name], program)
    if problem := find_difference(program):
        raise ProgramError(f"{problem}: the module that torch makes of it is wrong", help=WRITE)


def refuse_objects(program: ExportedProgram) -> None:
    """Refuse a program that takes an object which is no tensor.

    Raises:
        UnsupportedError: such as a generator of the model's own.
    """
    for spec in program.graph_signature.input_specs:
        if isinstance(spec.arg, CustomObjArgument):
            kind = "a generator" if spec.arg.class_fqn == "torch._C.Generator" else "an object"
            taken = program.graph.find_nodes(op="placeholder")
            users = [user for node in taken if node.name == spec.arg.name for user in node.users]
            raise UnsupportedError(
                f"the program uses {kind} of the model's own ({spec.arg.class_fqn})",
                help="draw from torch's default generator, and pass tensors only",
                used_at=edit.source_line(users[0]) if users else "",
            )


def _named(node: fx.Node, specs: dict[str, InputSpec]) -> str:
    if node.op == "placeholder":
        spec = specs[node.name]
        return f"{_kind(spec)} '{spec.target or node.name}'"
    return f"'{node.name}' ({node.target})"


def _kind(spec: InputSpec) -> str:
    return {InputKind.PARAMETER: "parameter", InputKind.BUFFER: "buffer", InputKind.USER_INPUT: "input"}.get(
        spec.kind, "constant"
    )


def _other_than_dense(node: fx.Node, value: torch.Tensor, is_input: bool) -> str:
    if value.layout != torch.strided:
        return f"a sparse tensor ({str(value.layout).removeprefix('torch.')})"
    if value.dtype in QUANTISED:
        return f"a quantised tensor ({str(value.dtype).removeprefix('torch.')})"
    if str(node.target).startswith(("aten.quantize_per_", "quantized.")):
        return "a quantised tensor"  # its fake value does not show it
    if is_input and not isinstance(value, FakeTensor):  # torch unwraps subclasses in leaves itself
        return f"a tensor subclass ({type(value).__name__})"
    return ""


def _check_state(node: fx.Node, spec: InputSpec, program: ExportedProgram) -> None:
    assert spec.target is not None
    value = program.state_dict.get(spec.target)
    value = program.constants.get(spec.target) if value is None else value
    if value is None:
        raise ProgramError(
            f"the program has no value for {_named(node, {node.name: spec})}",
            help="export the model again: its state was taken apart",
        )
    expected = edit.fake(node)
    if tuple(value.shape) != tuple(expected.shape) or value.dtype != expected.dtype:
        raise ProgramError(
            f"{_named(node, {node.name: spec})} is {value_text(value)}, the graph was exported with "
            f"{value_text(expected)}",
            help="put in the weights of the model that was exported, or export again",
        )


def refuse_hollow(program: ExportedProgram, use: str) -> None:
    """Check that the program's weights have values.

    Raises:
        ProgramError: the program was exported without them.
    """
    if hollow := sorted(weightless_names(program)):
        raise ProgramError(
            f"the program cannot be {use}: {len(hollow)} of its weights have no values, such as '{hollow[0]}'",
            help="export the model with its weights, or convert it and cut them from a checkpoint",
        )


def refuse_unwritable(graph: fx.Graph) -> None:
    """Check that torch.export.save supports the graph.

    Raises:
        UnsupportedError: it calls flex_attention, whose arguments torch cannot serialise.
    """
    for node in all_calls(graph):
        if str(node.target) == "flex_attention":
            raise UnsupportedError(
                f"the program cannot be written: torch.export.save does not take '{node.name}'",
                help="run rank_program(rank) in the process that makes it, or export with scaled_dot_product_attention",
                used_at=edit.source_line(node),
            )


def refuse_calls(program: ExportedProgram, graph: fx.Graph) -> None:
    """Check the calls after decomposition, in the program's graph without dead code.

    Raises:
        ProgramError: a collective, an op that mutates its operand, or an input and a written buffer with one name.
        UnsupportedError: higher-order ops other than control flow, custom objects, effects.
    """
    for spec in program.graph_signature.input_specs:
        if spec.kind in (InputKind.CUSTOM_OBJ, InputKind.TOKEN):
            raise UnsupportedError(
                f"input {spec.arg} is a {spec.kind.name.lower()}, which cannot be sharded yet",
                help="export the model without custom classes and side effects",
            )
    state = {*program.state_dict, *program.constants}
    inputs = {spec.arg.name for spec in user_inputs(program)}
    for written in program.graph_signature.output_specs:
        others = state if written.kind is OutputKind.USER_INPUT_MUTATION else inputs
        if written.kind in WRITTEN_KINDS and written.target in others:
            raise ProgramError(
                f"{written.target!r} is written, and names both an input and a buffer: torch knows them by name only",
                help="give one of them another name in the model, and export again",
            )
    for node in all_calls(graph):
        where = edit.source_line(node)
        if edit.is_collective(node):
            raise ProgramError(
                f"'{node.name}' ({node.target}) is a collective: the program is one rank's already",
                help="give the single-device program that it was made from",
                used_at=where,
            )
        if isinstance(node.target, HigherOrderOperator) and not has_bodies(node):
            raise _higher_order(node, str(node.target), where)
        if isinstance(node.target, OpOverload) and node.target._schema.is_mutable:
            raise ProgramError(
                f"'{node.name}' ({node.target}) still changes its operand in place",
                help="export with torch.export.export, which lets decomposition make the graph functional",
                used_at=where,
            )


def _higher_order(node: fx.Node, op: str, where: str) -> UnsupportedError:
    if op.startswith("auto_functionalized"):
        return UnsupportedError(
            f"the custom op {node.args[0]} changes its operands in place, which cannot be sharded yet",
            help="write the op so that it returns what it makes",
            used_at=where,
        )
    return UnsupportedError(
        f"'{node.name}' is a call of the higher-order op {op}, which cannot be sharded yet",
        help=f"export the model without {op}",
        used_at=where,
    )


def refuse_own_backwards(names: Collection[str]) -> None:
    """Refuse a model with custom backwards, which torch.export leaves out: they may be torch's on an example alone."""
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise UnsupportedError(
            f"the model has its own backward, which torch.export leaves out: {', '.join(list(names)[:3])}{more}",
            help="write it in the forward, such as x + (f(x) - x).detach() for a step with the gradient of x, or as a "
            "custom op with torch.library.register_autograd; remove hooks that only observe",
        )
