"""Floats encoded as integers of the same order in a change of sharding, from the check's own view of IEEE 754.

Why such integers exist: `ir/nan_safe_reduce.py`. The highest bit of a float is the sign. A positive float's bits
rise with it; a negative one's must be flipped, except for the sign. The bits of any NaN are replaced by the integer
that the reduction prefers to all others; flipped back, those are all ones, or all ones except the sign: a NaN.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from tpcompiler._torch import aten
from tpcompiler.ir import edit


class Form(NamedTuple):
    """The encoding of floats of one width: the place of the sign, all bits except the sign, and the integer for NaN."""

    floats: torch.dtype
    sign: int
    magnitude: int
    first: Mapping[str, int]


FORMS = {
    torch.int32: Form(torch.float32, 31, 0x7FFF_FFFF, {"max": 0x7FFF_FFFF, "min": -0x8000_0000}),
    torch.int64: Form(
        torch.float64, 63, 0x7FFF_FFFF_FFFF_FFFF, {"max": 0x7FFF_FFFF_FFFF_FFFF, "min": -0x8000_0000_0000_0000}
    ),
}


class Ordered(NamedTuple):
    """Nodes that encode (for the reduction `op`) or decode (`op` is empty), their operand, and the result."""

    op: str
    source: fx.Node
    nodes: tuple[fx.Node, ...]

    @property
    def result(self) -> fx.Node:
        return self.nodes[-1]


def loses_nan(op: str, dtype: torch.dtype) -> bool:
    """Return True for reductions of floats in which gloo or NCCL may lose a rank's NaN."""
    return dtype.is_floating_point and op in ("max", "min")


def find_ordered(nodes: Sequence[fx.Node]) -> Iterator[Ordered]:
    """Find every complete encoding and decoding among the nodes of a graph, by each op and constant."""
    own = set(nodes)  # the program may convert a value just before or after
    for node in nodes:
        match: Ordered | None = None
        if node.target is aten.masked_fill.Scalar:
            match = _match_encoding(node, own)
        elif node.target is aten.view.dtype and edit.outputs(node)[0].is_floating_point():
            match = _match_decoding(node, own)
        if match and all(user in match.nodes for each in match.nodes[:-1] for user in each.users):
            yield match


def _match_encoding(last: fx.Node, own: Collection[fx.Node]) -> Ordered | None:
    dtype = edit.outputs(last)[0].dtype
    if dtype not in FORMS or len(last.args) != 3:
        return None
    mirrored, is_nan, limit = last.args
    op = next((op for op, first in FORMS[dtype].first.items() if first == limit), "")
    if not op or (flip := _match_flip(mirrored, dtype)) is None:
        return None
    values, wide = _operand(flip[0], aten.view.dtype, (dtype,)), FORMS[dtype].floats
    if values is None or _operand(is_nan, aten.isnan.default, ()) is not values:
        return None
    if edit.outputs(values)[0].dtype != wide:
        return None
    nodes: tuple[Any, ...] = (*flip, is_nan, last)
    source = _operand(values, aten._to_copy.default, ())
    if source is not None and values in own and values.kwargs == {"dtype": wide} and _is_narrow(source):
        return Ordered(op, source, (values, *nodes))
    return Ordered(op, values, nodes)


def _match_decoding(floats: fx.Node, own: Collection[fx.Node]) -> Ordered | None:
    wide = edit.outputs(floats)[0].dtype
    integers = next((own for own, form in FORMS.items() if form.floats == wide), None)
    flip = _match_flip(floats.args[0], integers) if integers is not None else None
    if flip is None or floats.args[1:] != (wide,):
        return None
    nodes: tuple[Any, ...] = (*flip[1:], floats)
    user: Any = next(iter(floats.users), None)
    if len(floats.users) == 1 and user in own and user.target is aten._to_copy.default and _is_narrow(user):
        if user.kwargs == {"dtype": edit.outputs(user)[0].dtype}:
            nodes = (*nodes, user)
    return Ordered("", flip[0], nodes)


def _match_flip(last: Any, dtype: torch.dtype) -> tuple[fx.Node, ...] | None:
    """Return the operand of a flip of integers of `dtype`, and its nodes."""
    form = FORMS[dtype]
    if not isinstance(last, fx.Node) or last.target is not aten.bitwise_xor.Tensor or last.kwargs:
        return None
    bits, masked = last.args
    sign = _operand(masked, aten.bitwise_and.Scalar, (form.magnitude,))
    source = _operand(sign, aten.bitwise_right_shift.Tensor_Scalar, (form.sign,))
    if source is not bits or not isinstance(bits, fx.Node) or edit.outputs(bits)[0].dtype != dtype:
        return None
    return bits, sign, masked, last  # type: ignore[return-value]


def _operand(node: Any, target: Any, rest: tuple[Any, ...]) -> fx.Node | None:
    """Return the first operand of a call of `target` whose other operands are `rest`; None for any other node."""
    if not isinstance(node, fx.Node) or node.target is not target or node.args[1:] != rest:
        return None
    if node.kwargs and target is not aten._to_copy.default:
        return None
    return node.args[0] if isinstance(node.args[0], fx.Node) else None


def _is_narrow(node: fx.Node) -> bool:
    dtype = edit.outputs(node)[0].dtype
    return dtype.is_floating_point and dtype not in [form.floats for form in FORMS.values()]
