"""A program in another floating-point dtype, for the judge: more exact, or equal on all machines."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from tpcompiler._torch import HigherOrderOperator, OpOverload, aten, tree_flatten, tree_map
from tpcompiler.frontend.written_back import find_written, memory_of, writes
from tpcompiler.ir import edit
from tpcompiler.ir.control_flow import change_bodies, read_bodies, root_of
from tpcompiler.ir.draws import DROPOUTS, draws

# In bfloat16 the bounds are 0.06 to 0.13, and one missing all_reduce of 8 layers changes the logits by 0.14. So a
# program below float32 is compared once more with all of it in float32, where the bounds are about 1e-5.
WIDE = torch.float32


def is_narrow(nodes: Iterable[fx.Node]) -> bool:
    """Return True if some value has fewer bits than float32."""
    floats = (value.dtype for node in nodes for value in edit.outputs(node) if value.is_floating_point())
    return any(torch.finfo(dtype).bits < torch.finfo(WIDE).bits for dtype in floats)


class _State(Mapping[str, Any]):
    """A program's state in another dtype, converted on access so that a large model is not held twice."""

    def __init__(self, held: Mapping[str, Any], dtype: torch.dtype) -> None:
        self._held, self._dtype = held, dtype

    def __getitem__(self, name: str) -> Any:
        return promoted(self._held[name], self._dtype)

    def __contains__(self, name: object) -> bool:
        return name in self._held

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)


class Promoted:
    """A program with all floating-point (and complex) state and dtype arguments in one dtype, for `simulate`.

    Writes in place have the effect of the original's: memory that is separate in the exported dtypes stays separate.
    """

    def __init__(self, program: Any, dtype: torch.dtype) -> None:
        self.graph_signature = program.graph_signature
        self.state_dict: Mapping[str, Any] = _State(program.state_dict, dtype)
        self.constants: Mapping[str, Any] = _State(program.constants, dtype)
        self.written: set[str] = program.written if isinstance(program, Promoted) else find_written(program)
        self.graph = edit.copy_graph(program.graph)
        read_bodies(self.graph, program.graph_module)
        change_bodies(self.graph, functools.partial(_widen, dtype))
        self.graph_module = root_of(self.graph)
        _keep_bits_in_step(self.graph)
        for node in list(self.graph.nodes):
            _widen(dtype, node)


def _widen(dtype: torch.dtype, node: fx.Node) -> None:
    target = node.target.target if isinstance(node.target, _Widened) else node.target
    if target is aten._assert_tensor_metadata.default:
        edit.erase(node)  # it asserts the exported dtype
    elif isinstance(target, HigherOrderOperator) and str(target) == "wrap_with_autocast":
        node.target = _without_autocast
    elif isinstance(target, OpOverload) and target.namespace != "_c10d_functional":
        node.target = _Widened(node, target, dtype)


def _without_autocast(device: str, dtype: Any, enabled: bool, cached: Any, body: Any, *operands: Any) -> Any:
    """Run the body without autocast, which would choose other dtypes than the exported ones, or none."""
    return body(*operands)


ATTENTION = aten.scaled_dot_product_attention.default
SCALED = (aten.native_dropout.default, aten.dropout.default, aten.dropout_.default)
READS_BITS = (aten.view.dtype,)  # another dtype has other bits, and maybe more of them


class _Widened:
    """An op in another dtype; without such a kernel, the exported op with rounded operands and widened results.

    Such an op rounds in every run, so the difference of two runs would not show it. In float64, the most exact run,
    each of its results is moved by half a unit in the last place, up or down.
    """

    def __init__(self, node: fx.Node, target: OpOverload, dtype: torch.dtype) -> None:
        self.target = target
        self.__name__ = "widened"  # for the code that fx writes for a body
        self.exported = [edit.fake(operand).dtype for operand in edit.operands(node)]
        self.made = [value.dtype for value in edit.outputs(node)]
        self.dtype = dtype
        dtypes = {*self.exported, *self.made}
        self.mixed = len(dtypes) > 1 and len({each.is_complex for each in dtypes}) == 1
        before = node.target
        drawing: bool = before.draws if isinstance(before, _Widened) else draws(node)
        # Another dtype draws other numbers, except for these ops: their masks come from `bernoulli`, which has no
        # dtype.
        masked = target is ATTENTION or (target.overloadpacket in DROPOUTS and target not in SCALED)
        self.draws: bool = drawing and not masked

    def __str__(self) -> str:
        return str(self.target)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.draws and self.target in SCALED:
            results = self._run((torch.ones_like(args[0]), *args[1:]), kwargs)
            factor, *mask = results if isinstance(results, tuple) else (results,)
            scaled = args[0].mul_(factor) if self.target._schema.is_mutable else args[0] * factor
            return (scaled, *mask) if mask else scaled
        if self.draws or self.target in READS_BITS:
            return self._run(args, kwargs)
        widened = tree_map(lambda a: promoted_dtype(a, self.dtype), (args, kwargs))
        try:
            results = self.target(*widened[0], **widened[1])
        except Exception:  # ops raise anything for a dtype that they do not support
            return self._in_less(args, kwargs)
        return self._apart(results, args, kwargs) if self.mixed else results

    def _in_less(self, args: Any, kwargs: Any) -> Any:
        """Run the op in float32 if it can, else in the exported dtypes: the most exact way available."""
        results, eps = None, torch.finfo(torch.float32).eps
        if self.dtype == torch.float64:
            with contextlib.suppress(Exception):  # as above
                given = tree_map(lambda a: promoted_dtype(a, torch.float32), (args, kwargs))
                results = self._run(given[0], given[1], torch.float32)
        if results is None:
            results = self._run(args, kwargs)
            eps = max((torch.finfo(each).eps for each in self.made if each.is_floating_point), default=0.0)
        if self.dtype != torch.float64 or self.target._schema.is_mutable:
            return results
        return tree_map(lambda value: _moved(value, eps), results)

    def _run(self, args: Any, kwargs: Any, dtype: torch.dtype | None = None) -> Any:
        """Run the op on operands in their exported dtypes, or with all floating-point ones in `dtype`."""
        exported = iter(self.exported)
        taken: list[tuple[torch.Tensor, torch.Tensor]] = []

        def rounded(argument: Any) -> Any:
            if not isinstance(argument, torch.Tensor):
                return argument
            to = next(exported)
            taken.append((argument, argument.to(to if dtype is None else promoted_dtype(to, dtype))))
            return taken[-1][1]

        def wide(value: Any) -> Any:
            return next((argument for argument, given in taken if given is value), promoted(value, self.dtype))

        given = tree_map(rounded, (args, kwargs))
        results = self.target(*given[0], **given[1])
        if self.target._schema.is_mutable:
            for argument, narrow in taken:
                if narrow is not argument and narrow._version:
                    argument.copy_(narrow)
            return tree_map(wide, results)
        return tree_map(lambda value: promoted(value, self.dtype), results)

    def _apart(self, results: Any, args: Any, kwargs: Any) -> Any:
        """Copy results that share memory only because both now have one dtype: `wide = x.double(); wide.mul_(3)`."""
        exported, recorded = iter(self.exported), iter(self.made)
        lies_in = dict[int, torch.dtype]()
        for value in tree_flatten((args, kwargs))[0]:
            if isinstance(value, torch.Tensor):
                lies_in[_memory(value)] = next(exported)

        def own(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            dtype = next(recorded)
            return value.clone() if lies_in.get(_memory(value), dtype) != dtype else value

        return tree_map(own, results)


def _memory(value: torch.Tensor) -> int:
    """Identify the memory of a tensor; tensors mapped by vmap hide it, but are never written in place."""
    try:
        return int(value.untyped_storage()._cdata)
    except NotImplementedError:
        return id(value)


def _moved(value: Any, eps: float) -> Any:
    """Move values up or down by half a unit in the last place, with the same random signs in every run."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    signs = torch.randint(0, 2, value.shape, generator=torch.Generator().manual_seed(0)).to(value) * 2 - 1
    return value * (1 + signs * eps / 2)


def promoted(value: Any, dtype: torch.dtype) -> Any:
    """Convert a floating-point tensor to this dtype, a complex one to the matching one; keep anything else."""
    return value.to(promoted_dtype(value.dtype, dtype)) if isinstance(value, torch.Tensor) else value


def promoted_dtype(argument: Any, dtype: torch.dtype) -> Any:
    """Convert a floating-point or complex dtype; keep anything else."""
    if not isinstance(argument, torch.dtype):
        return argument
    return dtype if argument.is_floating_point else dtype.to_complex() if argument.is_complex else argument


def _keep_bits_in_step(graph: fx.Graph) -> None:
    """Copy every write to a value over to its bits, and every write to the bits over to the value.

    In a promoted dtype the two cannot share memory.

    Before    bits = view(x, int32); zero_(bits)
    After     bits = view(x, int32); zero_(bits); _copy_bits(bits, x)      x is in float64
    """
    views: list[fx.Node] = []
    for node in edit.calls(graph):
        if node.target in READS_BITS:
            views.append(node)
        elif views and writes(node):
            target = edit.operands(node)[0]
            above = [each for each in _chain(target) if each in views]
            siblings = [each for each in views if each not in above and memory_of(each) is memory_of(target)]
            pairs = [(each, each.args[0]) for each in above] + [(each.args[0], each) for each in siblings]
            for source, to in reversed(pairs):  # each is inserted right after the call
                dtypes = [edit.fake(each).dtype for each in (source, to)]  # type: ignore[arg-type]
                edit.insert_after(node, _copy_bits, (source, to, *dtypes), "bits")


def _chain(value: Any) -> Iterator[fx.Node]:
    """Yield a value, the value that it is a view of, and so on."""
    while isinstance(value, fx.Node):
        yield value
        value = value.args[0] if value.op == "call_function" and value.args else None


def _copy_bits(source: torch.Tensor, target: torch.Tensor, exported: torch.dtype, others: torch.dtype) -> None:
    """Write the bits of `source` in its exported dtype to `target`, in the other's."""
    target.copy_(source.to(exported).view(others))
