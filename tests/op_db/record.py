"""The aten calls behind torch's sample inputs, with their values: what a program holds, and what the rules are asked.

Exporting a sample takes 0.2 s; running it below a dispatch mode takes 0.2 ms. In inference mode torch hands composite
ops to the mode before it takes them apart, so the mode can decompose as `canonicalize` does.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

import tpcompiler.rules  # noqa: F401  (registers the rules)
from tpcompiler._torch import OpOverload, tree_flatten, tree_map
from tpcompiler.rules.registry import ops_with_rules


@dataclass
class Call:
    """One call that a program would hold, and the calls that it becomes in the canonical form (often itself).

    Attributes:
        inside: what it becomes; the inputs that are operands of the call are named as its operands are.
        tracked: whether `inside` tells all; not where something is written in place that other values share.
    """

    node: fx.Node
    inside: fx.Graph
    tracked: bool


@cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """torch's table for export without the ops that have a rule, as in `canonicalize`."""
    table = torch.export.default_decompositions()
    return {target: table[target] for target in list(table) if target not in ops_with_rules()}


def record(run: Callable[[], Any]) -> list[Call]:
    """Run something, and give every aten call that it makes by itself, in order (but those that only write)."""
    mode = _Recorder()
    with torch.inference_mode(), mode:
        run()
    return mode.calls


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self._inner: _Inner | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._inner is not None:
            return self._run(self._inner, func, args, kwargs)
        self._inner = inner = _Inner()
        try:
            node = inner.outside(func, args, kwargs)
            result = self._run(inner, func, args, kwargs)
        finally:
            self._inner = None
        if node is not None:
            node.meta["val"] = copied(result)
            self.calls.append(Call(node, inner.graph, inner.tracks(result)))
        return result

    def _run(self, inner: _Inner, func: OpOverload, args: Any, kwargs: Any) -> Any:
        """Take the call apart, or run and note it."""
        if func not in ops_with_rules():
            body = decompositions().get(func)
            if body is None and func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
                body = func.decompose
            if body is not None:
                with self:
                    result = body(*args, **kwargs)
                if result is not NotImplemented:
                    return result
        return inner.run(func, args, kwargs)


class _Inner:
    """The graph of what happens inside of one call."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self._nodes: dict[int, fx.Node] = {}
        self._alive: list[torch.Tensor] = []  # ids of dead tensors come back
        self._stale = set[int]()  # what has been written through another view of its memory
        self._lost = False

    def outside(self, func: OpOverload, args: Any, kwargs: Any) -> fx.Node | None:
        """The call by itself, in a graph of its own; its operands become inputs of the graph within."""
        target = functional(func)
        if target is None:
            return None
        graph = fx.Graph()
        operands: dict[int, fx.Node] = {}

        def placeholder(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if id(value) not in operands:
                inside = self._node(value)
                operands[id(value)] = graph.placeholder(inside.name)
                operands[id(value)].meta["val"] = inside.meta["val"]
            return operands[id(value)]

        args, kwargs = tree_map(placeholder, (args, kwargs))
        return graph.call_function(target, tuple(args), dict(kwargs))

    def run(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        """Run the call and note it, as the functional op that it stands for."""
        target = functional(func)
        nodes = tree_map(self._node, (args, kwargs))
        result = func(*args, **kwargs)
        if func._schema.is_mutable:
            self._forget(written(func, args, kwargs))
        if target is None:
            self._lost = True
            return result
        node = self.graph.call_function(target, tuple(nodes[0]), dict(nodes[1]))
        node.meta["val"] = copied(result)
        if isinstance(result, torch.Tensor):
            self._name(result, node)
        for at, part in enumerate(result if isinstance(result, tuple | list) else ()):
            if isinstance(part, torch.Tensor):
                self._name(part, self.graph.call_function(operator.getitem, (node, at)))
        return result

    def tracks(self, result: Any) -> bool:
        """Whether the graph says where every part of the result comes from."""
        return not self._lost and all(id(v) in self._nodes for v in _tensors(result))

    def _forget(self, changed: list[torch.Tensor]) -> None:
        """What was written, and what shares its memory, is from now on another value."""
        for value in self._alive:
            if any(_shared(value, other) for other in changed) and self._nodes.pop(id(value), None):
                self._stale.add(id(value))

    def _node(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and id(value) not in self._nodes:
            self._lost |= id(value) in self._stale
            self._name(value, self.graph.placeholder(f"x{len(self._nodes)}"))
        return self._nodes[id(value)] if isinstance(value, torch.Tensor) else value

    def _name(self, value: torch.Tensor, node: fx.Node) -> None:
        node.meta["val"] = copied(value)
        self._nodes[id(value)] = node
        self._alive.append(value)


def functional(func: OpOverload) -> OpOverload | None:
    """The op that gives what this one writes into its first operand; itself where it writes nothing."""
    if not func._schema.is_mutable:
        return func
    name = func._schema.name.removeprefix("aten::")
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None) if name.endswith("_") else None
    for overload in packet.overloads() if packet else ():
        found = getattr(packet, overload)
        if not found._schema.is_mutable and _kinds(found) == _kinds(func):
            return found
    return None


def _kinds(func: OpOverload) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in func._schema.arguments]


def written(func: OpOverload, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The operands that the call changes."""
    found = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += _tensors(args[position] if position < len(args) else kwargs.get(argument.name))
    return found


def copied(value: Any) -> Any:
    return tree_map(lambda v: v.clone() if isinstance(v, torch.Tensor) else v, value)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [v for v in tree_flatten(tree)[0] if isinstance(v, torch.Tensor)]


def _shared(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() != 0
