"""Floats encoded as integers of the same order in a change of sharding, from the check's own view of IEEE 754.

Why such integers exist: `ir/nan_safe_reduce.py`. The highest bit of a float is the sign. A positive float's bits
rise with it; a negative one's must be flipped, except for the sign. The bits of any NaN are replaced by the integer
that the reduction prefers to all others; flipped back, those are all ones, or all ones except the sign: a NaN.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import fx

from tpcompiler._torch import aten
from tpcompiler.ir import edit
from tpcompiler.judge.sound.numbering import Numbering

INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}
EXTREMA = ("max", "min")


class Ordered(NamedTuple):
    """Nodes that encode (for the reduction `op`) or decode (`op` is empty), and their operand."""

    op: str
    source: fx.Node
    nodes: tuple[fx.Node, ...]


def loses_nan(op: str, dtype: torch.dtype) -> bool:
    """Return True for reductions of floats in which gloo or NCCL may lose a rank's NaN."""
    return dtype.is_floating_point and op in EXTREMA


def find_ordered(nodes: Sequence[fx.Node], operand: fx.Node) -> Iterator[Ordered]:
    """Find every complete encoding and decoding of floats of the operand's dtype, by each op and constant."""
    dtype = edit.outputs(operand)[0].dtype
    if not dtype.is_floating_point or all(node.target is not aten.view.dtype for node in nodes):
        return
    table, inside = Numbering(), set(nodes)
    used = (each for node in nodes for each in node.all_input_nodes if each not in inside)
    known = {each: table.number("outside", each) for each in (operand, *used)}
    numbers = {node: table.of(node, known) for node in nodes}
    for op, source in itertools.product((*EXTREMA, ""), (operand, *filter(edit.is_tensor, nodes))):
        if edit.outputs(source)[0].dtype != (dtype if op else INTEGERS[_wide(dtype)]):
            continue
        pattern = _pattern(op, dtype)
        own = {next(iter(pattern.nodes)): known[source]}
        steps = [table.of(node, own) for node in pattern.nodes][1:]
        found = tuple(node for node in nodes if numbers[node] in steps)
        ends = [node for node in found if numbers[node] == steps[-1]]
        if ends and all(user in found for node in found if node not in ends for user in node.users):
            yield Ordered(op, source, found)


@cache
def _pattern(op: str, dtype: torch.dtype) -> fx.Graph:
    """Return the ops that encode floats for a reduction or, without one, decode them."""
    graph = fx.Graph()
    call, source = graph.call_function, graph.placeholder("x")
    wide = _wide(dtype)
    integers = torch.iinfo(INTEGERS[wide])
    floats = call(aten._to_copy.default, (source,), {"dtype": wide}) if op and dtype != wide else source
    bits = call(aten.view.dtype, (floats, INTEGERS[wide])) if op else source
    sign = call(aten.bitwise_right_shift.Tensor_Scalar, (bits, integers.bits - 1))
    flipped = call(aten.bitwise_xor.Tensor, (bits, call(aten.bitwise_and.Scalar, (sign, integers.max))))
    if op:
        is_nan = call(aten.isnan.default, (floats,))
        call(aten.masked_fill.Scalar, (flipped, is_nan, integers.max if op == "max" else integers.min))
        return graph
    floats = call(aten.view.dtype, (flipped, wide))
    if dtype != wide:
        call(aten._to_copy.default, (floats,), {"dtype": dtype})
    return graph


def _wide(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype in INTEGERS else torch.float32
