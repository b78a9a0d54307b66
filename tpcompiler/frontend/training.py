"""From a module that computes a loss to one program of its forward and its backward."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
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
    aten,
    input_key,
    output_keys,
    trace_joint,
    tree_flatten,
    tree_names,
    tree_unflatten,
)
from tpcompiler.errors import InputsError, ProgramError, reason
from tpcompiler.ir import edit
from tpcompiler.ir.rebuilt import copy_signature, rebuilt
from tpcompiler.rules.registry import ops_with_rules

KEPT_META = ("val", "stack_trace", "torch_fn", "source_fn_stack")


def export_training(
    model: torch.nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Callable[..., torch.Tensor] | str | None = None,
    targets: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
) -> ExportedProgram:
    """Export a model's forward and backward as one program, which `parallelize` takes like any other.

    The program returns `{"outputs": what the model returns, "gradients": {parameter: gradient}}`; buffers that the
    forward writes are written. A parameter that is tied to others has one gradient, under its first name. Parameters
    with `requires_grad=False`, and those that the loss does not depend on, have none.

    Args:
        model: in the mode (train or eval) in which it shall run.
        args: example inputs.
        kwargs: example inputs by name.
        loss: a function of the model's output and the targets; the program then takes the targets by name too, and
            its outputs are `{"loss": ..., "output": ...}`. Or the name of the output that is the loss, if the model
            computes it; by default its only output without dims.
        targets: example inputs of the loss function.
        dynamic_shapes: as for `torch.export.export`, by the names of inputs and targets.

    Raises:
        InputsError: no output, or several, can be the loss.
        ProgramError: torch cannot export the model, or not its backward.
    """
    forward = model.forward
    if callable(loss):
        model.forward = _with_loss(forward, loss, tuple(targets or {}))
    try:
        program = torch.export.export(
            model, tuple(args), {**(kwargs or {}), **(targets or {})}, dynamic_shapes=dynamic_shapes, strict=False
        )
    except Exception as error:  # any error that a model raises on an example
        raise ProgramError(f"torch.export cannot export it: {reason(error)}") from error
    finally:
        model.__dict__.pop("forward", None)
    return add_backward(program, "loss" if callable(loss) else loss)


def _with_loss(forward: Callable[..., Any], loss: Callable[..., torch.Tensor], targets: Sequence[str]) -> Any:
    """Return a forward that also takes the targets, and returns the loss beside the output."""

    @functools.wraps(forward)
    def run(*args: Any, **named: Any) -> dict[str, Any]:
        given = {name: named.pop(name) for name in targets}
        output = forward(*args, **named)
        return {"loss": loss(output, **given), "output": output}

    old = inspect.signature(forward)
    own = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in targets]
    run.__signature__ = old.replace(parameters=[*old.parameters.values(), *own])  # type: ignore[attr-defined]
    return run


def add_backward(program: ExportedProgram, loss: str | None = None) -> ExportedProgram:
    """Return the program with the gradients of one output.

    Args:
        program: exported with gradients enabled.
        loss: the name of the output; by default the only float without dims.

    Raises:
        InputsError: no output, or several, can be the loss.
        ProgramError: torch cannot trace the backward.
    """
    at = _find_loss(program, loss)
    try:
        joint = trace_joint(program, at, ops_with_rules())
    except Exception as error:  # whatever torch raises on the way
        raise ProgramError(f"torch cannot trace the backward: {reason(error)}") from error
    return _Writer(program, joint, at).written()


def _find_loss(program: ExportedProgram, loss: str | None) -> int:
    """Return the position of the loss among the user's outputs."""
    output: Any = program.graph.output_node().args[0]
    specs = program.graph_signature.output_specs
    values = [v for v, spec in zip(output, specs, strict=True) if spec.kind is OutputKind.USER_OUTPUT]
    assert program.call_spec.out_spec is not None
    names = tree_names(program.call_spec.out_spec)
    scalars = [at for at, value in enumerate(values) if edit.is_tensor(value) and _is_loss(edit.fake(value))]
    found = scalars if loss is None else [at for at in scalars if names[at] == loss]
    if len(found) != 1:
        asked = "can be the loss" if loss is None else f"is {loss!r}, a float without dims"
        raise InputsError(
            f"{len(found) or 'none'} of the outputs {names} {asked}", help="name one by loss=, or pass a function"
        )
    return found[0]


def _is_loss(value: torch.Tensor) -> bool:
    return value.is_floating_point() and value.ndim == 0


class _Writer:
    """Write a joint graph as an exported program with the inputs of the forward's."""

    def __init__(self, program: ExportedProgram, joint: fx.Graph, loss: int) -> None:
        self.program, self.joint, self.loss = program, joint, loss
        self.graph = fx.Graph()
        self.copies: dict[fx.Node, fx.Node] = {}
        self.names: dict[object, str] = {}  # by what a placeholder of the joint graph holds

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
        specs = self._write_outputs(output)
        signature = copy_signature(self.program.graph_signature)
        return self._described(rebuilt(self.program, self.graph, ExportGraphSignature(signature.input_specs, specs)))

    def _write_inputs(self) -> None:
        """Write the placeholders of the program, in its order."""
        held = {input_key(node): node for node in self.joint.nodes if node.op == "placeholder"}
        given = 0
        placeholders = (node for node in self.program.graph.nodes if node.op == "placeholder")
        for node, spec in zip(placeholders, self.program.graph_signature.input_specs, strict=True):
            copied = self.graph.placeholder(node.name)
            copied.meta = dict(node.meta)
            key: Any = spec.target
            if spec.kind is InputKind.USER_INPUT:
                key, given = given, given + 1
            self.names[key] = node.name if spec.kind is InputKind.USER_INPUT else str(spec.target)
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
        old = self.program.graph_signature.output_specs
        user = [spec for spec in old if spec.kind is OutputKind.USER_OUTPUT]
        own: dict[str, dict[Any, fx.Node]] = {"written": {}, "output": {}, "gradient": {}}
        for kind, key, value in output_keys(output):
            own[kind][key] = self.copies[value]
        found = [
            (_spec(OutputKind.USER_INPUT_MUTATION if isinstance(key, int) else OutputKind.BUFFER_MUTATION, value,
                   self.names[key]), value)
            for key, value in own["written"].items()
        ]  # fmt: skip
        for at, spec in enumerate(user):
            made: Any = own["output"].get(at)
            if made is not None:
                kind = OutputKind.LOSS_OUTPUT if at == self.loss else OutputKind.USER_OUTPUT
                spec = _spec(kind, made, None)
            found.append((spec, made))
        for key in self.names:
            if key in own["gradient"]:
                kind = OutputKind.GRADIENT_TO_USER_INPUT if isinstance(key, int) else OutputKind.GRADIENT_TO_PARAMETER
                found.append((_spec(kind, own["gradient"][key], self.names[key]), own["gradient"][key]))
        self.graph.output(tuple(value for _, value in found)).meta = {}
        self.graph.eliminate_dead_code()
        return [spec for spec, _ in found]

    def _described(self, program: ExportedProgram) -> ExportedProgram:
        """Say in the pytree of the results that gradients are among them."""
        spec = program.call_spec.out_spec
        assert spec is not None
        outputs = tree_unflatten(list(range(spec.num_leaves)), spec)
        targets = {
            kind: {str(each.target): 0 for each in program.graph_signature.output_specs if each.kind is kind}
            for kind in (OutputKind.GRADIENT_TO_PARAMETER, OutputKind.GRADIENT_TO_USER_INPUT)
        }
        results = {"outputs": outputs, "gradients": {**targets[OutputKind.GRADIENT_TO_PARAMETER]}}
        if inputs := targets[OutputKind.GRADIENT_TO_USER_INPUT]:
            results["input_gradients"] = inputs
        root = next(each for each in program.module_call_graph if each.fqn == "")
        assert root.signature is not None
        root.signature.out_spec = tree_flatten(results)[1]
        root.signature.outputs = []
        return program


def _spec(kind: OutputKind, value: fx.Node, target: str | None) -> OutputSpec:
    return OutputSpec(kind, TensorArgument(name=value.name), target)
