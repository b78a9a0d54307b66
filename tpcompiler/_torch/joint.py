"""The joint graph of a program's forward and backward, as torch traces it for its own compiler."""

from __future__ import annotations

import contextlib
import functools
import operator
import warnings
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._decomp import _core_aten_decompositions_post_autograd
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    ViewBaseAOTInput,
)
from torch._guards import TracingContext, tracing
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.export.exported_program import _register_constants_as_buffers  # type: ignore[attr-defined]
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from tpcompiler._torch.ops import aten

ABOVE_AUTOGRAD = {torch._C.DispatchKey.CompositeImplicitAutograd, torch._C.DispatchKey.Autograd}
Key = str | int  # the name of a leaf, or the position of the user's tensor or of an output


def trace_joint(
    program: ExportedProgram,
    loss: int,
    kept: Collection[OpOverload],
    draws: Callable[[fx.Node], bool],
    own: Mapping[OpOverload, Callable[..., Any]],
) -> fx.Graph:
    """Trace a program forward and the backward of one of its outputs, in core ATen ops and the `kept` ones.

    The functions in `own` take the place of torch's own decompositions, unless they return NotImplemented.

    Calls that draw are outputs too, behind the program's own: torch leaves out those that nothing uses, after which
    others would draw other numbers.

    Placeholders and the output are described by `input_key` and `output_keys`. Nodes keep the modules of the forward
    in `nn_module_stack`, those of the backward in `fwd_nn_module_stack`.
    """
    # only who trains needs these, and torch._dynamo with them
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
    from torch.export._trace import (  # type: ignore[attr-defined]
        _compiling_state_context,
        _fakify_params_buffers,
        _ignore_backend_decomps,
    )

    table: dict[Any, Any] = {
        op: each
        for op, each in _core_aten_decompositions_post_autograd().items()
        if op not in kept and not _draws_otherwise(op)
    }
    table[aten._native_batch_norm_legit_functional.default] = _batch_norm_of_dense
    module = program.module(check_guards=False)
    given = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
    values = (node.meta.get("val") for node in program.graph.nodes)
    mode = next(value.fake_mode for value in values if isinstance(value, FakeTensor))
    _register_constants_as_buffers(module, program.state_dict, program.graph_signature.non_persistent_buffers)
    fakes = _fakify_params_buffers(mode, module)
    args, kwargs = tree_unflatten(given, module._in_spec)
    _write_outputs(module.graph, loss, draws, _requiring_gradients(module, fakes, args, kwargs, mode))
    module.recompile()
    with contextlib.ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for each in (
            mode,
            tracing(TracingContext(mode)),
            _reparametrize_module(module, fakes, tie_weights=True, strict=True, stack_weights=True),
            _ignore_backend_decomps(),
            _compiling_state_context(),
            torch.enable_grad(),
            _replacing(own),
        ):
            stack.enter_context(each)
        traced = aot_export_joint_with_descriptors(
            stack, module, (*args, *kwargs.values()), decompositions=table, _record_nn_module_stack=True
        )
    return traced.graph_module.graph


@contextlib.contextmanager
def _replacing(own: Mapping[OpOverload, Callable[..., Any]]) -> Iterator[None]:
    """Run these functions instead of the Python kernels that torch runs above its autograd, in this block."""
    before = {op: dict(op.py_kernels) for op in own}
    for op, function in own.items():
        for key in ABOVE_AUTOGRAD.intersection(op.py_kernels):
            op.py_kernels[key] = functools.partial(_run_first, function, op.py_kernels[key])
        op._dispatch_cache.clear()
    try:
        yield
    finally:
        for op, kernels in before.items():
            op.py_kernels.clear()
            op.py_kernels.update(kernels)
            op._dispatch_cache.clear()


def _run_first(function: Callable[..., Any], other: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    result = function(*args, **kwargs)
    return other(*args, **kwargs) if result is NotImplemented else result


def _draws_otherwise(op: Any) -> bool:
    """Return True for an op that draws: its decomposition may draw numbers of another dtype than its kernel."""
    return isinstance(op, OpOverload) and torch.Tag.nondeterministic_seeded in op.tags


def _batch_norm_of_dense(x: torch.Tensor, *args: Any) -> Any:
    """Normalise a copy in row-major order of a value in another one, whose result torch expects in that other one."""
    if x.ndim > 3 or x.is_contiguous():
        return NotImplemented
    return aten._native_batch_norm_legit_functional.default(x.contiguous(), *args)


def _requiring_gradients(module: Any, fakes: Mapping[str, Any], args: Any, kwargs: Any, mode: Any) -> list[bool]:
    """Return for each output True if it requires a gradient; run on copies, because a forward may write to buffers."""

    known: dict[int, torch.Tensor] = {}  # tied tensors have one copy

    def copied(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and id(value) not in known:
            known[id(value)] = value.detach().clone().requires_grad_(value.requires_grad)
        return known.get(id(value), value)

    with contextlib.ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if mode.shape_env is not None:
            stack.enter_context(mode.shape_env.suppress_guards())
        for each in (mode, torch.enable_grad()):
            stack.enter_context(each)
        own = {name: copied(value) for name, value in fakes.items()}
        stack.enter_context(_reparametrize_module(module, own, tie_weights=True, strict=True, stack_weights=True))
        made = tree_flatten(module(*tree_map(copied, args), **tree_map(copied, kwargs)))[0]
    return [isinstance(value, torch.Tensor) and value.requires_grad for value in made]


def _write_outputs(graph: fx.Graph, loss: int, draws: Callable[[fx.Node], bool], required: Sequence[bool]) -> None:
    """Add the draws to the outputs, and detach all but the loss: torch asks for a gradient of each output otherwise.

    Those that require no gradient are detached twice (`has_gradient`): the joint graph does not say what ran without.
    """
    output: Any = graph.output_node()
    with graph.inserting_before(output):
        drawn = [
            graph.call_function(operator.getitem, (node, 0)) if isinstance(node.meta.get("val"), tuple | list) else node
            for node in list(graph.nodes)
            if draws(node)
        ]
        for node in drawn:
            node.meta.setdefault("val", next(iter(node.all_input_nodes), node).meta.get("val"))
        values = [
            graph.call_function(aten.detach.default, (value,)) if at != loss and _is_tensor(value) else value
            for at, value in enumerate([*output.args[0], *drawn])
        ]
        for at, requires_gradient in enumerate(required):
            if at != loss and not requires_gradient and _is_tensor(output.args[0][at]):
                values[at] = graph.call_function(aten.detach.default, (values[at],))
    output.args = (tuple(values),)
    if drawn:
        codegen: Any = graph._codegen  # the joint graph does not say how outputs are nested
        codegen.pytree_info = codegen.pytree_info._replace(out_spec=tree_flatten(values)[1])


def has_gradient(output: fx.Node, parameters: Container[str]) -> bool:
    """Return True if an output of a program with gradients required one in the module, for one of these parameters.

    It does if it depends on one through no more than one detach, which is that of the export.
    """
    ahead, seen = [(output, 0)], set[tuple[fx.Node, int]]()
    while ahead:
        node, passed = ahead.pop()
        passed += node.target is aten.detach.default
        if passed > 1 or (node, passed) in seen:
            continue
        if node.name in parameters:
            return True
        seen.add((node, passed))
        ahead += [(each, passed) for each in node.all_input_nodes]
    return False


def _is_tensor(value: Any) -> bool:
    found = value.meta.get("val") if isinstance(value, fx.Node) else None
    return isinstance(found[0] if isinstance(found, tuple | list) else found, torch.Tensor)


def input_key(node: fx.Node) -> Key | None:
    """Return what a placeholder of a joint graph holds; None for the gradient of an output."""
    described = node.meta["desc"]
    if isinstance(described, ParamAOTInput | BufferAOTInput):
        return described.target
    return described.idx if isinstance(described, PlainAOTInput) else None


def output_keys(output: fx.Node) -> list[tuple[str, Key, fx.Node]]:
    """Return (what it is: "written", "output" or "gradient"; of what; the value) of each output of a joint graph."""
    found: list[tuple[str, Key, fx.Node]] = []
    for described, value in zip(output.meta["desc"], output.args[0], strict=True):  # type: ignore[arg-type]
        if not isinstance(value, fx.Node):
            continue  # a number, or the gradient of what the loss does not depend on
        if isinstance(described, InputMutationAOTOutput):
            found.append(("written", _key_of(described.mutated_input), value))
        elif isinstance(described, PlainAOTOutput):
            found.append(("output", described.idx, value))
        elif isinstance(described, GradAOTOutput):
            found.append(("gradient", _key_of(described.grad_of), value))
        else:
            raise AssertionError(described)
    return found


def _key_of(described: Any) -> Key:
    if isinstance(described, ViewBaseAOTInput):  # stands for all that are views of it
        described = described.base_of
    key: Key = described.idx if isinstance(described, PlainAOTInput) else described.target
    return key
