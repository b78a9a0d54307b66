"""Trace the decomposition of one call, once for all calls whose arguments have the same layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from tpcompiler._torch import (
    FakeTensorMode,
    HigherOrderOperator,
    OpOverload,
    enable_python_dispatcher,
    trace_ops,
)
from tpcompiler.frontend.written_back import updates_statistics
from tpcompiler.ir import edit
from tpcompiler.ir.local import key


class NotSimple(Exception):
    """A program that torch has to trace as a whole."""


class Bodies:
    """The decompositions of calls, as graphs from the values that a call reads to its results."""

    def __init__(self, mode: FakeTensorMode, table: Mapping[Any, Any]) -> None:
        self.mode, self.table = mode, table
        self.known: dict[Any, fx.Graph] = {}

    def find(self, node: fx.Node, op: Any, operands: Sequence[fx.Node]) -> fx.Graph:
        """Return the decomposition of a call of `op` with a node's arguments, its inputs being these operands.

        Raises:
            NotSimple: it creates tensors, writes in place or has control flow, or an operand is a conjugated view.
        """
        number = {used: at for at, used in enumerate(node.all_input_nodes)}
        args = fx.node.map_arg((node.args, dict(node.kwargs)), lambda used: ("node", number[used]))
        call = op, key(args), key(operands)
        if call not in self.known:
            values = [edit.fake(each) for each in operands]
            self.known[call] = _trace(node, op, values, self.mode, self.table)
        return self.known[call]


def _trace(node: fx.Node, op: Any, values: Sequence[Any], mode: FakeTensorMode, table: Mapping[Any, Any]) -> fx.Graph:
    inputs = node.all_input_nodes
    if any(isinstance(v, torch.Tensor) and (v.is_conj() or v.is_neg()) for v in values):
        raise NotSimple(node.name)

    def body(*values: Any) -> Any:
        values_of = dict(zip(inputs, values, strict=True))
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda used: values_of[used])
        return op(*args, **kwargs)

    with mode, torch.no_grad(), enable_python_dispatcher():
        own = [  # a tracer identifies its inputs as objects
            torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device)
            if isinstance(v, torch.Tensor)
            else v
            for v in values
        ]
        graph = trace_ops(body, *own, table=table)
    for inner in graph.nodes:
        is_op = isinstance(inner.target, OpOverload)
        if inner.op == "get_attr" or (inner.op == "call_function" and is_op and inner.target._schema.is_mutable):
            raise NotSimple(node.name)
        if isinstance(inner.target, HigherOrderOperator) or (is_op and updates_statistics(inner)):
            raise NotSimple(node.name)
    return graph
