"""Floats as integers of the same order, so that a reduction over ranks to a maximum or minimum keeps NaN.

gloo compares with `<`, and NCCL calls fmax and fmin: a NaN on one rank can be lost, and on gloo the largest number with
it. torch gives NaN. As an integer, NaN is above (for a minimum: below) all numbers, and any backend reduces integers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from tpcompiler._torch import aten
from tpcompiler.ir import edit

INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}
EXTREMA = ("max", "min")


class Ordered(NamedTuple):
    """Nodes that encode (for the reduction `op`) or decode (`op` is empty), the node they do it to, and the result."""

    op: str
    source: fx.Node
    nodes: tuple[fx.Node, ...]

    @property
    def result(self) -> fx.Node:
        return self.nodes[-1]


def is_lossy(op: str, dtype: torch.dtype) -> bool:
    """True if a backend may lose a NaN in this reduction."""
    return op in EXTREMA and dtype.is_floating_point


def sent_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the integers that floats are sent as; no backend reduces integers of two bytes."""
    return INTEGERS[_wide(dtype)]


def sent_itemsize(op: str, itemsize: int) -> int:
    """Return how many bytes each element of `itemsize` bytes takes in a reduction over ranks."""
    is_half = itemsize == torch.half.itemsize
    return sent_dtype(torch.half).itemsize if op in EXTREMA and is_half else itemsize


def encode(x: torch.Tensor, op: str) -> torch.Tensor:
    """Return integers in the order of `x`, with NaN as the one that `op` ("max" or "min") prefers to all others."""
    wide = _wide(x.dtype)
    values = x if x.dtype == wide else x.to(wide)
    return torch.masked_fill(_mirror(values.view(INTEGERS[wide])), values.isnan(), _nan(op, INTEGERS[wide]))


def decode(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the floats that `encode` made `x` of."""
    values = _mirror(x).view(_wide(dtype))
    return values if values.dtype == dtype else values.to(dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype in INTEGERS else torch.float32


def _nan(op: str, dtype: torch.dtype) -> int:
    """Return the bits of a NaN: of all integers the largest or the smallest, which `_mirror` maps to -1."""
    limits = torch.iinfo(dtype)
    return limits.max if op == "max" else limits.min


def _mirror(bits: torch.Tensor) -> torch.Tensor:
    """Flip all bits of negative floats but the sign: they rise as their magnitude falls. Its own inverse."""
    sign = torch.bitwise_right_shift(bits, torch.iinfo(bits.dtype).bits - 1)
    return torch.bitwise_xor(bits, torch.bitwise_and(sign, torch.iinfo(bits.dtype).max))


def find_ordered(nodes: Sequence[fx.Node]) -> Iterator[Ordered]:
    """Find every complete encoding and decoding among the nodes of a graph, by each op and constant."""
    own = set(nodes)  # the program may convert a value just before or after
    for node in nodes:
        found: Ordered | None = None
        if node.target is aten.masked_fill.Scalar:
            found = _match_encoding(node, own)
        elif node.target is aten.view.dtype and edit.outputs(node)[0].is_floating_point():
            found = _match_decoding(node, own)
        if found and all(user in found.nodes for each in found.nodes[:-1] for user in each.users):
            yield found


def _match_encoding(last: fx.Node, own: Collection[fx.Node]) -> Ordered | None:
    dtype = edit.outputs(last)[0].dtype
    if dtype not in INTEGERS.values() or len(last.args) != 3:
        return None
    mirrored, is_nan, limit = last.args
    op = next((op for op in EXTREMA if _nan(op, dtype) == limit), "")
    if not op or (found := _match_mirror(mirrored, dtype)) is None:
        return None
    values, wide = _operand(found[0], aten.view.dtype, (dtype,)), _wide_of(dtype)
    if values is None or _operand(is_nan, aten.isnan.default, ()) is not values:
        return None
    if edit.outputs(values)[0].dtype != wide:
        return None
    nodes: tuple[Any, ...] = (*found, is_nan, last)
    source = _operand(values, aten._to_copy.default, ())
    if source is not None and values in own and values.kwargs == {"dtype": wide} and _is_narrow(source):
        return Ordered(op, source, (values, *nodes))
    return Ordered(op, values, nodes)


def _match_decoding(floats: fx.Node, own: Collection[fx.Node]) -> Ordered | None:
    wide = edit.outputs(floats)[0].dtype
    found = _match_mirror(floats.args[0], INTEGERS[wide]) if wide in INTEGERS else None
    if found is None or floats.args[1:] != (wide,):
        return None
    nodes: tuple[Any, ...] = (*found[1:], floats)
    user: Any = next(iter(floats.users), None)
    if len(floats.users) == 1 and user in own and user.target is aten._to_copy.default and _is_narrow(user):
        if user.kwargs == {"dtype": edit.outputs(user)[0].dtype}:
            nodes = (*nodes, user)
    return Ordered("", found[0], nodes)


def _match_mirror(last: Any, dtype: torch.dtype) -> tuple[fx.Node, ...] | None:
    """Return the operand of a `_mirror` of integers of `dtype`, and the nodes of it."""
    limits = torch.iinfo(dtype)
    if not isinstance(last, fx.Node) or last.target is not aten.bitwise_xor.Tensor or last.kwargs:
        return None
    bits, masked = last.args
    sign = _operand(masked, aten.bitwise_and.Scalar, (limits.max,))
    source = _operand(sign, aten.bitwise_right_shift.Tensor_Scalar, (limits.bits - 1,))
    if source is not bits or not isinstance(bits, fx.Node) or edit.outputs(bits)[0].dtype != dtype:
        return None
    return bits, sign, masked, last  # type: ignore[return-value]


def _operand(node: Any, target: Any, rest: tuple[Any, ...]) -> fx.Node | None:
    """Return the first operand of a call of `target` that takes `rest` after it; None for any other node."""
    if not isinstance(node, fx.Node) or node.target is not target or node.args[1:] != rest:
        return None
    if node.kwargs and target is not aten._to_copy.default:
        return None
    return node.args[0] if isinstance(node.args[0], fx.Node) else None


def _wide_of(integers: torch.dtype) -> torch.dtype:
    return next(wide for wide, own in INTEGERS.items() if own == integers)


def _is_narrow(node: fx.Node) -> bool:
    dtype = edit.outputs(node)[0].dtype
    return dtype.is_floating_point and dtype not in INTEGERS
