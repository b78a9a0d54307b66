"""Fake local values: a rank's share of a global value, as the tracer sees it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from tpcompiler._torch import FakeTensor, FakeTensorMode, enable_python_dispatcher, shape_facts, sym_hint
from tpcompiler.errors import InternalError
from tpcompiler.ir import edit
from tpcompiler.ir.dim_sharding import Size
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.sharding import Sharding
from tpcompiler.ir.sizes import statically_equal, torch_form

KEY = "tpcompiler_key"  # in a node's meta: its value and that value's key


def fake_mode_of(graph: fx.Graph) -> FakeTensorMode:
    """Return the fake mode that the program's values live in, with its shape environment.

    It runs ops that have no kernel for fake values, such as `fake_quantize_per_tensor_affine`, on zeros, as the mode of
    a fresh export does. torch gives a program read from a file a mode that refuses these ops.
    """
    values = (node.meta.get("val") for node in graph.nodes)
    mode = next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None) or FakeTensorMode()
    mode.allow_fallback_kernels = True
    return mode


def fake_result(node: fx.Node) -> Any:
    """Return the result of a call for the fake values of its operands.

    Ops run as in an export: some, such as padding, have kernels for plain sizes, which would bake in the example's.
    """
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda operand: edit.fake(operand))
    with fake_mode_of(node.graph), torch.no_grad(), enable_python_dispatcher():
        return node.target(*args, **kwargs)  # type: ignore[operator]


def insert_call(before: fx.Node, target: Any, args: Sequence[Any], name: str, **kwargs: Any) -> fx.Node:
    """Insert a call of an op, with its fake value."""
    node = edit.insert_before(before, target, args, name)
    node.kwargs = kwargs
    edit.record(node, fake_result(node))
    return node


@contextlib.contextmanager
def no_new_guards(*graphs: fx.Graph) -> Iterator[None]:
    """Keep the programs' shape environments unchanged.

    The user's programs share these environments, and a guard would specialise a size. Questions about sizes are
    answered from the example and not recorded. A value that such an answer made static does not have its claimed shape,
    which `localize_shapes` notices.

    Raises:
        InternalError: the shape environment learnt something about a size all the same.
    """
    modes = [fake_mode_of(graph) for graph in graphs]
    before = [shape_facts(mode) for mode in modes]
    with contextlib.ExitStack() as stack:
        for env in {id(mode.shape_env): mode.shape_env for mode in modes if mode.shape_env is not None}.values():
            stack.enter_context(env.suppress_guards())
        yield
    if (after := [shape_facts(mode) for mode in modes]) != before:
        raise InternalError(
            f"compiling specialised a dynamic size: guards, replacements and assertions went from {before} to {after}",
            help="report this with the model and the plan",
        )


def is_contiguous(value: torch.Tensor) -> bool:
    """Return True if the value is row-major and dense; adds no guard."""
    expected: Size = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if not (isinstance(size, int) and size == 1):
            if not statically_equal(stride, expected):
                return False
            expected = expected * size
    return True


def same_layout(value: torch.Tensor) -> torch.Tensor:
    """Return a new tensor without data, with the strides of `value`; `empty_like` would make those of a slice dense."""
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def memory_order(value: torch.Tensor) -> list[int]:
    """Return the dims of `value` in memory order, outermost first; in their own order if it is expanded."""
    for size, stride in zip(value.shape, value.stride(), strict=True):
        if statically_equal(stride, 0) and not statically_equal(size, 1):
            return list(range(value.ndim))
    return sorted(range(value.ndim), key=lambda d: (-sym_hint(value.stride(d)), d))


def local_strides(value: torch.Tensor, shape: Sequence[Size]) -> list[Size]:
    """Return dense strides for `shape` in the memory order of `value`."""
    strides: list[Size] = [0] * value.ndim
    step: Size = 1
    for dim in reversed(memory_order(value)):
        strides[dim] = step
        step = step * (1 if isinstance(shape[dim], int) and shape[dim] <= 1 else shape[dim])
    return strides


def local_value(
    value: torch.Tensor, sharding: Sharding, mesh: Mesh, coordinate: Mapping[str, int], mode: FakeTensorMode
) -> torch.Tensor:
    """Return a fake tensor of the local shape at `coordinate`, with the memory order of the global value."""
    shape = sharding.local_shape(value.shape, mesh, coordinate)
    if sharding.is_replicated:
        return value
    with mode:
        return torch.empty_strided(shape, local_strides(value, shape), dtype=value.dtype, device=value.device)


def key(value: Any) -> Any:
    """Return a hashable description of an argument: tensors by layout, sizes by expression, nodes by their values."""
    if isinstance(value, fx.Node):
        return _key_of(value)
    if value is None or isinstance(value, (int, str)):
        return (type(value).__name__, value)
    if isinstance(value, torch.Tensor):
        sizes: tuple[Any, Any] = value.shape, value.stride()
        if value._has_symbolic_sizes_strides:
            sizes = _sizes(sizes[0]), _sizes(sizes[1])
        return ("t", *sizes, value.dtype, value.device, value.is_conj(), value.is_neg())
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return ("s", torch_form(value.node.expr))
    if isinstance(value, (list, tuple)):
        return ("l", *(key(v) for v in value))
    if isinstance(value, dict):
        return ("d", *((k, key(v)) for k, v in value.items()))
    if isinstance(value, (float, complex)):
        return (type(value).__name__, repr(value))  # 0.0 differs from -0.0
    return (type(value).__name__, value)


def _key_of(node: fx.Node) -> Any:
    """Return the key of a node's value, cached on the node because all passes use it."""
    value = node.meta.get("val")
    cache = node.meta.get(KEY)
    if cache is None or cache[0] is not value:
        cache = node.meta[KEY] = value, key(value)
    return cache[1]


def _sizes(sizes: Sequence[Size]) -> tuple[Any, ...]:
    return tuple(s if isinstance(s, int) else torch_form(s.node.expr) for s in sizes)
