"""One call of an op as plain data: a claim records the whole op whose share a rank's program computes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from tpcompiler._torch import op_overload
from tpcompiler.runtime.records import CallRecord

NAMED = (torch.dtype, torch.layout, torch.memory_format)  # printed as `torch.x`


def write_call(node: fx.Node) -> CallRecord:
    """Return the op and all its arguments in a JSON-compatible form, nodes by name."""
    assert isinstance(node.target, torch._ops.OpOverload)
    return CallRecord(
        op=f"{node.target._schema.name}.{node.target._overloadname}",
        args=[_to_json(value) for value in node.args],
        kwargs={name: _to_json(value) for name, value in node.kwargs.items()},
    )


def read_call(
    call: CallRecord, value: Callable[[str], Any], device: torch.device
) -> tuple[torch._ops.OpOverload, tuple[Any, ...], dict[str, Any]]:
    """Read back a call that `write_call` wrote, with nodes replaced by `value(name)` and devices by `device`.

    Returns:
        (op, args, kwargs)

    Raises:
        ValueError: `call` is no such call.
    """
    op = op_overload(call.op)
    if op is None:
        raise ValueError(f"{call.op!r} is no op that torch has here")

    def read(argument: Any) -> Any:
        if isinstance(argument, list):
            return [read(each) for each in argument]
        if not isinstance(argument, dict):
            return argument
        ((kind, text),) = argument.items()
        if kind == "node":
            return value(text)
        if kind == "device":
            return device
        constant = getattr(torch, str(text), None) if kind == "torch" else float(text) if kind == "float" else None
        if kind not in ("torch", "float") or (kind == "torch" and not isinstance(constant, NAMED)):
            raise ValueError(f"{argument!r} is no argument of a call")
        return constant

    return op, tuple(map(read, call.args)), {name: read(each) for name, each in call.kwargs.items()}


def nodes_named(call: CallRecord) -> set[str]:
    """Return the names of the nodes in a call's arguments."""

    def names(value: Any) -> Iterator[str]:
        if isinstance(value, list):
            for each in value:
                yield from names(each)
        elif isinstance(value, dict) and "node" in value:
            yield value["node"]

    return {*names(list(call.args)), *names(list(call.kwargs.values()))}


def _to_json(value: Any) -> Any:
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, (list, tuple)):
        return [_to_json(each) for each in value]
    if isinstance(value, NAMED):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": value.type}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    return value
