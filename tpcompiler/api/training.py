"""Export a model and its loss with all gradients, and compare them with those of the module, run by torch itself."""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind, OutputSpec

from tpcompiler._torch import (
    RETURNED_KINDS,
    WRITTEN_KINDS,
    accumulated_into,
    hooks_around,
    hooks_behind,
    keep_versions,
    record_own_backwards,
    tree_flatten,
    tree_map,
    tree_names,
    tree_unflatten,
)
from tpcompiler.errors import (
    InputsError,
    ProgramError,
    TpCompilerError,
    TpCompilerWarning,
    UnsupportedError,
    explaining,
    reason,
)
from tpcompiler.frontend.example_inputs import copy_repeated
from tpcompiler.frontend.refused import refuse_own_backwards
from tpcompiler.frontend.training import add_backward
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.shared_memory import find_shared, is_same_view
from tpcompiler.judge.compare.compare import compare_calls
from tpcompiler.judge.compare.judge import Layout
from tpcompiler.judge.compare.simulate import RankResult, random_state, set_random_state
from tpcompiler.judge.compare.subject import Subject
from tpcompiler.rules.registry import ops_with_rules
from tpcompiler.runtime.artifact import SINGLE


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
        _check_own_gradients(model, program, args, named)
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
    # any error that a model raises on an example
    with explaining("torch.export cannot export it", "", Exception, raised=ProgramError):
        return torch.export.export(model, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False)


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


SMALL = 0.1  # what a parameter or an input that is zero is moved by
DIFFERENT = "look for code that runs differently under torch.export, or report this with the model"
SEED = 7_368_787_312_401
GRADIENTS = (OutputKind.GRADIENT_TO_PARAMETER, OutputKind.GRADIENT_TO_USER_INPUT)


def _check_own_gradients(
    model: torch.nn.Module, program: ExportedProgram, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Run the module and its backward, and compare with the program: on the example, and on a second draw.

    torch.export leaves out hooks where gradients are accumulated, and makes a constant of a parameter that is not the
    model's. The generators begin at another state than that in which a `torch.manual_seed` of the forward, which it
    leaves out too, has left them. In the second draw, parameters and inputs are moved: behind a parameter that starts
    at zero, no gradient shows. The module's state, its gradients, and the generators are as before. A program without
    values is not run. A module that rejects the second draw is compared on the example alone, with a warning.

    Raises:
        ProgramError: an output, gradient or buffer of the program is not the module's own, or torch raises.
    """
    tensors = [*model.parameters(), *model.buffers(), *tree_flatten((args, kwargs))[0]]
    tensors = [value for value in tensors if isinstance(value, torch.Tensor)]
    if not all(type(each) in (torch.Tensor, torch.nn.Parameter) and each.device.type != "meta" for each in tensors):
        return
    with _kept_state(model), _another_random_state():
        _compare(model, program, args, kwargs)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad and not parameter.is_inference() and not _is_expanded(parameter):
                    parameter.copy_(_moved(parameter, generator))
        torch.clear_autocast_cache()  # its copies of parameters have not moved
        args, kwargs = tree_map(lambda each: _moved(each, generator), (tuple(args), dict(kwargs)))
        try:
            _compare(model, program, args, kwargs)
        except _ModuleRaises as error:  # it may reject values that were moved
            warnings.warn(
                f"the gradients are compared on the example alone: with other values, {error.message}",
                TpCompilerWarning,
                stacklevel=3,
            )


class _ModuleRaises(ProgramError):
    """The module raises, or its backward."""


class _Whole(Layout):
    """The layout of one device."""

    def cut(self, name: str, value: torch.Tensor, rank: int) -> torch.Tensor:
        return value

    def join(self, name: str, parts: Sequence[torch.Tensor], shape: torch.Size) -> list[torch.Tensor]:
        return list(parts)


def _compare(model: torch.nn.Module, program: ExportedProgram, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise if the program is not the module; of no finite number nothing is compared."""
    assert program.call_spec.out_spec is not None
    names = tree_names(program.call_spec.out_spec)
    inputs, flat = program.graph_signature.user_inputs, tree_flatten((args, kwargs))[0]
    subject = Subject(
        program,
        [program],
        _Whole(Mesh.of(1), {}),
        [str(name) for name, value in zip(inputs, flat, strict=True) if isinstance(value, torch.Tensor)],
        names,
        run=lambda shares: [_run_module(model, program, shares[0])],
    )
    try:
        report = compare_calls({SINGLE: subject}, [(SINGLE, args, kwargs)])
    except InputsError:
        return
    wrong = [each for each in report.outputs if not each.ok]
    if wrong:
        first = min(wrong, key=lambda each: "gradients." not in each.name)
        more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise ProgramError(
            f"{first.name!r} of the exported program is not the module's own{more}: rel err {first.rel:.3g} in values "
            f"up to {first.magnitude:.3g} (tolerance {first.tolerance:.3g})",
            help=DIFFERENT,
        )


def _run_module(model: torch.nn.Module, program: ExportedProgram, flat: Sequence[Any]) -> RankResult:
    """Return what the module and its backward make of flat inputs, in the order of the program's outputs."""
    signature = program.graph_signature
    returned = [spec for spec in signature.output_specs if spec.kind in RETURNED_KINDS]
    graded = [spec for spec in returned if spec.kind in GRADIENTS]
    inputs = dict(zip(signature.user_inputs, flat, strict=True))
    inputs = {name: each.detach().clone() if isinstance(each, torch.Tensor) else each for name, each in inputs.items()}
    for spec in graded:
        if spec.kind is OutputKind.GRADIENT_TO_USER_INPUT:
            inputs[str(spec.target)].requires_grad_()
    before = random_state()
    versions = {name: each._version for name, each in model.named_parameters()}
    try:
        with torch.inference_mode(False), torch.enable_grad(), record_own_backwards() as own_backwards:
            args, kwargs = tree_unflatten(list(inputs.values()), program.call_spec.in_spec)
            outputs = tree_flatten(model(*args, **kwargs))[0]
            by = [
                attrgetter(str(spec.target))(model)
                if spec.kind is OutputKind.GRADIENT_TO_PARAMETER
                else inputs[str(spec.target)]
                for spec in graded
            ]
            loss = outputs[next(at for at, spec in enumerate(returned) if spec.kind is OutputKind.LOSS_OUTPUT)]
            others = _parameters_without(model, graded)
            _refuse_other_leaves(loss, [*model.parameters(), *inputs.values()])
            refuse_own_backwards(own_backwards | dict.fromkeys(hooks_behind(loss)))
            with _without_gradients(model):
                loss.backward()  # not autograd.grad: hooks where gradients are accumulated, and checkpoints, need it
                found = [each.grad for each in (*by, *others.values())]
        refuse_own_backwards(own_backwards)  # what a checkpoint runs again has its own
    except TpCompilerError:
        raise
    except Exception as error:  # whatever a model raises
        raise _ModuleRaises(f"the model's own backward raises: {reason(error)}", help="fix the model first") from error
    finally:
        drawn = random_state()
        set_random_state(before)
    if changed := [name for name, each in model.named_parameters() if each._version != versions[name]]:
        raise ProgramError(
            f"the model's forward writes to the parameter {changed[0]!r}, which only an optimizer may change",
            help="change it after optimizer.step(), outside of the forward, also what Embedding(max_norm=) does",
        )
    written = {
        str(spec.target): attrgetter(str(spec.target))(model).detach().clone()
        if spec.kind is OutputKind.BUFFER_MUTATION
        else inputs[str(spec.target)]
        for spec in signature.output_specs
        if spec.kind in WRITTEN_KINDS
    }
    for name, gradient in zip(others, found[len(by) :], strict=True):
        if gradient is not None and gradient.any():
            raise ProgramError(f"the exported program has no gradient of {name!r}, and the module has", help=DIFFERENT)
    filled = [torch.zeros_like(each) if own is None else own for own, each in zip(found, by, strict=False)]
    return RankResult([*outputs, *filled], written, drawn)


def _parameters_without(model: torch.nn.Module, graded: Sequence[OutputSpec]) -> dict[str, torch.nn.Parameter]:
    """Return the parameters that the program has no gradient of, and that could have one."""
    held = {id(attrgetter(str(spec.target))(model)) for spec in graded if spec.kind is GRADIENTS[0]}
    return {name: each for name, each in model.named_parameters() if each.requires_grad and id(each) not in held}


def _refuse_other_leaves(loss: torch.Tensor, known: Sequence[Any]) -> None:
    """Refuse a loss that depends on a parameter of something else than the model: the program holds its value."""
    held = {id(each) for each in known}
    for leaf in accumulated_into(loss):
        if id(leaf) not in held:
            raise ProgramError(
                f"the loss depends on a tensor {list(leaf.shape)} that requires a gradient and is no parameter of the "
                "model, so it would stay as it is",
                help="make it a parameter of the model, such as a module that holds the model and the loss",
            )


@contextlib.contextmanager
def _without_gradients(model: torch.nn.Module) -> Iterator[None]:
    """Take the gradients of parameters away for the block."""
    old = [(each, each.grad) for each in model.parameters()]
    for each, _ in old:
        each.grad = None
    try:
        yield
    finally:
        for each, gradient in old:
            each.grad = gradient


@contextlib.contextmanager
def _kept_state(model: torch.nn.Module) -> Iterator[None]:
    """Restore parameters and buffers after the block, and how often they were written: a loss may wait for them."""
    state = [*model.parameters(), *model.buffers()]
    old = [(each, each.detach().clone()) for each in state]
    try:
        with keep_versions([each for each in state if not each.is_inference()]):
            try:
                yield
            finally:
                for each, value in old:
                    if not _is_expanded(each) and not torch.equal(each, value):  # batch norm does not count its writes
                        with torch.inference_mode(each.is_inference()), torch.no_grad():
                            each.copy_(value)
    finally:
        torch.clear_autocast_cache()


def _is_expanded(value: torch.Tensor) -> bool:
    """Return True if elements are one in memory, so that nothing can be written to them."""
    return any(size > 1 and not stride for size, stride in zip(value.shape, value.stride(), strict=True))


@contextlib.contextmanager
def _another_random_state() -> Iterator[None]:
    """Let the generators begin at a state that no forward sets."""
    before = random_state()
    gpu = None if before[1] is None else torch.Generator("cuda").manual_seed(SEED).get_state()
    set_random_state((torch.Generator().manual_seed(SEED).get_state(), gpu))
    try:
        yield
    finally:
        set_random_state(before)


def _moved(value: Any, generator: torch.Generator) -> Any:
    """Return floats moved towards zero by up to a quarter, which keeps signs and bounds; zeros become small numbers."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    draw = torch.rand(value.shape, generator=generator).to(value)
    return value.detach() * (1 - draw / 4) if value.any() else SMALL * draw
