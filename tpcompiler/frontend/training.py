"""Add the backward of one output to a program: one program returns it and all gradients."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    OutputKind,
    OutputSpec,
    TensorArgument,
)

from tpcompiler._torch import (
    HigherOrderOperator,
    Key,
    OpOverload,
    all_tensors,
    aten,
    input_key,
    output_keys,
    trace_joint,
    tree_flatten,
    tree_names,
    tree_unflatten,
)
from tpcompiler.errors import InputsError, ProgramError, UnsupportedError, reason
from tpcompiler.frontend.kernel_differences import LAYERS, LOSSES, allow_copies
from tpcompiler.frontend.refused import refuse_objects
from tpcompiler.ir import edit
from tpcompiler.ir.draws import draws
from tpcompiler.ir.exported import copy_signature, rebuilt
from tpcompiler.ir.program import Program, tied
from tpcompiler.ir.shared_memory import find_shared

KEPT_META = ("val", "stack_trace", "torch_fn", "source_fn_stack")


def add_backward(program: ExportedProgram, kept: Collection[OpOverload], loss: str | None = None) -> ExportedProgram:
    """Return the program with the gradients of one output.

    Args:
        program: exported with gradients enabled.
        kept: ops that stay whole, instead of torch's decompositions of them.
        loss: the name of the output; by default the only float without dims.

    Raises:
        InputsError: no output, or several, can be the loss.
        ProgramError: torch cannot trace the backward.
        UnsupportedError: control flow, an op with effects, an object that is no tensor, or a sparse gradient.
    """
    refuse_objects(program)
    at = _find_loss(program, loss)
    try:
        joint = trace_joint(program, at, kept, draws, LOSSES | LAYERS)
    except Exception as error:  # whatever torch raises on the way
        raise ProgramError(f"torch cannot trace the backward: {reason(error)}") from error
    _refuse_ops(joint)
    return _JointWriter(program, joint, at).written()


def _refuse_ops(joint: fx.Graph) -> None:
    for node in edit.calls(joint):
        if isinstance(node.target, HigherOrderOperator):
            called = next((each for each in node.args if isinstance(each, OpOverload)), node.target)
            raise UnsupportedError(
                f"'{node.name}' ({called}) is not supported in a program with gradients",
                help="compute both branches and choose with torch.where, or call an op without checks or effects",
                used_at=edit.source_line(node),
            )
        if edit.is_tensor(node) and edit.fake(node).layout is not torch.strided:
            raise UnsupportedError(
                f"'{node.name}' makes a sparse gradient ({node.target})",
                help="make the layer with sparse=False",
                used_at=edit.source_line(node),
            )


def _find_loss(program: ExportedProgram, loss: str | None) -> int:
    """Return the position of the loss among the user's outputs."""
    output: Any = program.graph.output_node().args[0]
    specs = program.graph_signature.output_specs
    values = [v for v, spec in zip(output, specs, strict=True) if spec.kind is OutputKind.USER_OUTPUT]
    assert program.call_spec.out_spec is not None
    names = tree_names(program.call_spec.out_spec)
    floats = [at for at, value in enumerate(values) if edit.is_tensor(value) and edit.fake(value).is_floating_point()]
    scalars = [at for at in floats if edit.ndim(values[at]) == 0]
    found = scalars if loss is None else [at for at in scalars if names[at] == loss]
    if len(found) != 1:
        asked = "can be the loss" if loss is None else f"is {loss!r}, a float without dims"
        raise InputsError(
            f"{len(found) or 'none'} of the outputs {names} {asked}", help="name one by loss=, or pass a function"
        )
    return found[0]


class _JointWriter:
    """Write a joint graph as an exported program with the inputs of the forward's."""

    def __init__(self, program: ExportedProgram, joint: fx.Graph, loss: int) -> None:
        self.program, self.joint, self.loss = program, joint, loss
        self.graph = fx.Graph()
        self.copies: dict[fx.Node, fx.Node] = {}
        self.names: dict[Key, str] = {}  # of leaves and inputs; of a tied tensor the first
        own = Program(program, program.graph)
        fqns = {node.name: fqn for node, fqn in own.leaves()}
        self.first_names = {name: fqns[first] for name, first in tied(own).items()}

    def written(self) -> ExportedProgram:
        self._write_inputs()
        output = self.joint.output_node()
        for node in self.joint.nodes:
            if node.op == "placeholder" and node not in self.copies:
                self._write_one(node)
            elif node.op not in ("placeholder", "output"):
                copied = self.graph.node_copy(node, lambda used: self.copies[used])
                copied.meta = {name: node.meta[name] for name in KEPT_META if name in node.meta}
                stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
                copied.meta["nn_module_stack"] = stack or {}
                self.copies[node] = copied
        allow_copies(self.graph)
        specs = self._write_outputs(output)
        signature = copy_signature(self.program.graph_signature)
        return self._described(rebuilt(self.program, self.graph, ExportGraphSignature(signature.input_specs, specs)))

    def _write_inputs(self) -> None:
        """Write the placeholders of the program, in its order."""
        held = {input_key(node): node for node in self.joint.nodes if node.op == "placeholder"}
        given = 0
        for node, spec in edit.placeholders(self.program):
            copied = edit.add_input(self.graph, node.name)
            copied.meta = dict(node.meta)
            key: Key = str(spec.target)
            if spec.kind is InputKind.USER_INPUT:
                key, given = given, given + 1
            self.names[key] = node.name if isinstance(key, int) else self.first_names[node.name]
            if key in held:
                self.copies[held[key]] = copied

    def _write_one(self, tangent: fx.Node) -> None:
        """Write the gradient of the loss by itself, which is 1."""
        value = edit.fake(tangent)
        one = self.graph.call_function(aten.full.default, ([], 1), {"dtype": value.dtype, "device": value.device})
        one.meta = {"val": value, "nn_module_stack": {}}
        self.copies[tangent] = one

    def _write_outputs(self, output: fx.Node) -> list[OutputSpec]:
        """Write what the program returns: first what is written back, then its outputs, then the gradients."""
        own: dict[str, dict[Key, fx.Node]] = {"written": {}, "output": {}, "gradient": {}}
        for kind, key, value in output_keys(output):
            own[kind][key] = self.copies[value]
        specs, values = list[OutputSpec](), list[Any]()
        held = {*self.program.graph_signature.buffers, *self.program.graph_signature.parameters}
        _refuse_shared(self.program, {str(key) for key in own["written"]})
        for key, value in own["written"].items():
            if not isinstance(key, int) and self.names[key] not in held:
                raise ProgramError(
                    f"the forward writes to {self.names[key]!r}, a tensor {list(edit.shape(value))} that is no buffer "
                    "of the model",
                    help="register it as a buffer, and modules as attributes, those of the loss in a module that holds "
                    "model and loss",
                )
            specs.append(_spec(OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION, value, self.names, key))
            values.append(value)
        old = self.program.graph_signature.output_specs
        for at, spec in enumerate(spec for spec in old if spec.kind is OutputKind.USER_OUTPUT):
            made = own["output"].get(at)
            if made is not None:
                kind_of_output = OutputKind.LOSS_OUTPUT if at == self.loss else OutputKind.USER_OUTPUT
                spec = OutputSpec(kind_of_output, TensorArgument(name=made.name), None)
            specs.append(spec)
            values.append(made)
        for key in self.names:
            if key in own["gradient"]:
                kinds = OutputKind.GRADIENT_TO_PARAMETER, OutputKind.GRADIENT_TO_USER_INPUT
                specs.append(_spec(*kinds, own["gradient"][key], self.names, key))
                values.append(own["gradient"][key])
        self.graph.output(tuple(values)).meta = {}
        self.graph.eliminate_dead_code()
        return specs

    def _described(self, program: ExportedProgram) -> ExportedProgram:
        """Say in the pytree of the results that gradients are among them."""
        root = next(each.signature for each in program.module_call_graph if each.fqn == "")
        assert root is not None
        assert root.out_spec is not None
        results: dict[str, Any] = {"outputs": tree_unflatten(list(range(root.out_spec.num_leaves)), root.out_spec)}
        for name, kind in (
            ("gradients", OutputKind.GRADIENT_TO_PARAMETER),
            ("input_gradients", OutputKind.GRADIENT_TO_USER_INPUT),
        ):
            specs = program.graph_signature.output_specs
            if own := {str(spec.target): 0 for spec in specs if spec.kind is kind}:
                results[name] = own
        root.out_spec, root.outputs = tree_flatten(results)[1], []
        return program


def _refuse_shared(program: ExportedProgram, written: Set[str]) -> None:
    values = all_tensors(program)
    for pair in find_shared(values):
        if not written.isdisjoint(pair):
            one, other = (f"{name!r} {list(values[name].shape)}" for name in pair)
            raise ProgramError(
                f"the forward writes to memory that {one} and {other} share",
                help="register what the forward writes as buffers in separate memory",
            )


def _spec(of_leaf: OutputKind, of_input: OutputKind, value: fx.Node, names: Mapping[Key, str], key: Key) -> OutputSpec:
    """Return the entry of a value that belongs to a leaf, or to an input, which has a number."""
    return OutputSpec(of_input if isinstance(key, int) else of_leaf, TensorArgument(name=value.name), names[key])
