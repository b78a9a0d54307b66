"""A program in another floating-point dtype, for the judge: more exact, or the same on all machines."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx

from tpcompiler._torch import OpOverload, aten, tree_map
from tpcompiler.ir import edit
from tpcompiler.ir.bodies import change_bodies, read_bodies, root_of
from tpcompiler.ir.draws import draws


class _State(Mapping[str, Any]):
    """What a program holds, in another dtype, made when it is asked for: of a large model it is not held twice."""

    def __init__(self, held: Mapping[str, Any], dtype: torch.dtype) -> None:
        self._held, self._dtype = held, dtype

    def __getitem__(self, name: str) -> Any:
        return promoted(self._held[name], self._dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)


class Promoted:
    """A program with all floating-point (and complex) state and dtype arguments in one dtype, as far as `simulate`
    reads it."""

    def __init__(self, program: Any, dtype: torch.dtype) -> None:
        self.graph_signature = program.graph_signature
        self.state_dict: Mapping[str, Any] = _State(program.state_dict, dtype)
        self.constants: Mapping[str, Any] = _State(program.constants, dtype)
        self.graph = edit.copy_graph(program.graph)
        read_bodies(self.graph, program.graph_module)
        change_bodies(self.graph, functools.partial(_widen, dtype))
        self.graph_module = root_of(self.graph)
        for node in list(self.graph.nodes):
            _widen(dtype, node)


def _widen(dtype: torch.dtype, node: fx.Node) -> None:
    target = node.target.target if isinstance(node.target, _Widened) else node.target
    if target is aten._assert_tensor_metadata.default:
        edit.erase(node)  # it states the dtype that was exported
    elif isinstance(target, OpOverload) and target.namespace != "_c10d_functional":
        node.target = _Widened(node, target, dtype)


DROPOUT, ATTENTION = aten.native_dropout.default, aten.scaled_dot_product_attention.default
READS_BITS = (aten.view.dtype,)  # another dtype has other bits, and maybe more of them


class _Widened:
    """An op in another dtype; where it has no such kernel, as exported, with operands rounded and results widened."""

    def __init__(self, node: fx.Node, target: OpOverload, dtype: torch.dtype) -> None:
        self.target = target
        self.__name__ = "widened"  # for the code that fx writes of a body
        self.exported = [operand.meta["val"].dtype for operand in edit.operands(node)]
        self.dtype = dtype
        before = node.target
        drawing: bool = before.as_exported if isinstance(before, _Widened) else draws(node)
        # In another dtype other numbers are drawn; but attention has its mask from `bernoulli`, which has no dtype.
        self.as_exported: bool = target in READS_BITS or (drawing and target is not ATTENTION)

    def __str__(self) -> str:
        return str(self.target)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.as_exported and self.target is DROPOUT:
            factor, mask = self._as_exported((torch.ones_like(args[0]), *args[1:]), kwargs)
            return args[0] * factor, mask
        if self.as_exported:
            return self._as_exported(args, kwargs)
        widened = tree_map(lambda a: _float(a, self.dtype), (args, kwargs))
        try:
            return self.target(*widened[0], **widened[1])
        except Exception:  # whatever the op raises at a dtype that it does not know
            return self._as_exported(args, kwargs)

    def _as_exported(self, args: Any, kwargs: Any) -> Any:
        exported = iter(self.exported)
        rounded = tree_map(lambda a: a.to(next(exported)) if isinstance(a, torch.Tensor) else a, (args, kwargs))
        return tree_map(lambda v: promoted(v, self.dtype), self.target(*rounded[0], **rounded[1]))


def promoted(value: Any, dtype: torch.dtype) -> Any:
    """A floating-point (complex) tensor in this dtype (the complex one of its size); anything else as it is."""
    return value.to(_float(value.dtype, dtype)) if isinstance(value, torch.Tensor) else value


def _float(argument: Any, dtype: torch.dtype) -> Any:
    if not isinstance(argument, torch.dtype):
        return argument
    return dtype if argument.is_floating_point else dtype.to_complex() if argument.is_complex else argument
