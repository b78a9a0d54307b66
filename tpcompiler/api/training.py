"""Export a model and its loss with all gradients."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram

from tpcompiler._torch import hooks_around, record_own_backwards
from tpcompiler.api.own_gradients import check_own_gradients
from tpcompiler.errors import ProgramError, UnsupportedError, reason
from tpcompiler.frontend.example_inputs import copy_repeated
from tpcompiler.frontend.refused import refuse_own_backwards
from tpcompiler.frontend.training import add_backward
from tpcompiler.ir.shared_memory import find_shared, is_same_view
from tpcompiler.rules.registry import ops_with_rules


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
        ProgramError: torch cannot export the model, or not its backward; a gradient is not the module's own (it is
            compared on the example and on a second draw); or the loss depends on a parameter outside the model.
        UnsupportedError: the model has control flow (`torch.cond`), or ops with effects; or its own backward, which
            torch.export leaves out (`torch.autograd.Function`, hooks on gradients); or forward hooks, with a loss
            function.
    """
    if torch.is_inference_mode_enabled():
        raise UnsupportedError(
            "torch.inference_mode() is on, in which no tensor has a gradient",
            help="call export_training outside of it; torch.no_grad() may be on",
        )
    _refuse_shared_parameters(model)
    args, named = copy_repeated((tuple(args), {**(kwargs or {}), **(targets or {})}))
    own = dict(model.__dict__)
    if callable(loss):
        if hooks := hooks_around(model):
            raise UnsupportedError(
                "with loss= the model's forward takes the targets and returns the loss, and a hook would see them: "
                + hooks[0],
                help="export a module that calls the model and the loss, without loss=, or remove the hook",
            )
        model.forward = _with_loss(model.forward, loss, tuple(targets or {}))
    try:
        modules = (model, loss) if isinstance(loss, torch.nn.Module) else (model,)
        with record_own_backwards(*modules) as own_backwards:
            program = _exported(model, tuple(args), named, dynamic_shapes)
        refuse_own_backwards(own_backwards)
        program = add_gradients(program, "loss" if callable(loss) else loss)
        check_own_gradients(model, program, args, named)
    finally:
        model.__dict__.pop("forward", None)
        model.__dict__.update({name: own[name] for name in ("forward",) if name in own})
    return program


def _refuse_shared_parameters(model: torch.nn.Module) -> None:
    """Refuse two parameters in one memory: the program would have one gradient, the sum of both."""
    values = {name: each for name, each in model.named_parameters() if each.requires_grad}
    for one, other in find_shared(values):
        if is_same_view(values[one], values[other]):
            raise ProgramError(
                f"{one!r} and {other!r} are two parameters in one memory, each with its own gradient",
                help="tie them (b.weight = a.weight), or give one a copy",
            )


def _exported(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any
) -> ExportedProgram:
    try:
        return torch.export.export(model, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False)
    except Exception as error:  # any error that a model raises on an example
        raise ProgramError(f"torch.export cannot export it: {reason(error)}") from error


def add_gradients(program: ExportedProgram, loss: str | None = None) -> ExportedProgram:
    """Return a program with the gradients of one output, as `export_training` does; `loss` is the output's name."""
    return add_backward(program, ops_with_rules(), loss)


def _with_loss(forward: Callable[..., Any], loss: Callable[..., torch.Tensor], targets: Sequence[str]) -> Any:
    """Return a forward that also takes the targets, and returns the loss with the output."""

    @functools.wraps(forward)
    def run(*args: Any, **named: Any) -> dict[str, Any]:
        given = {name: named.pop(name) for name in targets}
        output = forward(*args, **named)
        return {"loss": loss(output, **given), "output": output}

    old = inspect.signature(forward)
    own = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in targets]
    parameters = [*old.parameters.values(), *own]
    parameters.sort(key=lambda each: each.kind)  # `**kwargs` of the model last
    run.__signature__ = old.replace(parameters=parameters)  # type: ignore[attr-defined]
    return run
