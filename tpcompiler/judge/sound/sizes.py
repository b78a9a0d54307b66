"""The sizes at which pieces of a program are run: numbers for dynamic ones, and small ones if these prove as much."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from tpcompiler._torch import aten, c10d_functional
from tpcompiler.errors import RuleError
from tpcompiler.ir import edit
from tpcompiler.judge.sound.folded import Folded
from tpcompiler.judge.sound.region import ProgramRegion
from tpcompiler.judge.sound.unsound import DoesNotRun
from tpcompiler.rules.registry import rule_of

SMALL = 16
# Their numbers are compared with values, and are not sizes.
OF_VALUES = (
    aten.sub.Tensor,
    aten.lt.Scalar,
    aten.ge.Scalar,
    aten.scalar_tensor.default,
    aten.masked_fill.Scalar,
)
# All other ops in a change of sharding treat all dims alike except one, or all dims.
ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, WAIT = (
    getattr(c10d_functional, name).default
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "wait_tensor")
)
ALONG_DIM = (
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.cat.default,
    aten.index_select.default,
)
ALONG_FIRST = (ALL_GATHER, REDUCE_SCATTER)
ALONG_NONE = (
    ALL_REDUCE,
    WAIT,
    aten.clone.default,
    aten.div.Tensor,
    operator.getitem,
    aten.arange.default,
    aten.add.Tensor,  # for places
)


def plain(value: Any, made: Folded) -> Any:
    """Return a size (or number, or truth value) with a number in its range for every symbol.

    Raises:
        DoesNotRun: it divides by a size that becomes 0.
    """
    if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value
    expr, ranges = value.node.expr, made.program.range_constraints
    numbers = {symbol: made.sizes.of(symbol, ranges.get(symbol)) for symbol in expr.free_symbols}
    try:
        result = expr.xreplace(numbers)
    except ZeroDivisionError as error:
        raise DoesNotRun(None, f"there is no size {expr}") from error
    kinds: list[tuple[type, type]] = [(torch.SymInt, int), (torch.SymFloat, float), (torch.SymBool, bool)]
    return next(kind for symbolic, kind in kinds if isinstance(value, symbolic))(result)


def whole_shape(made: Folded, whole: fx.Node) -> list[int]:
    return [plain(size, made) for size in edit.outputs(whole)[0].shape]


def region_shapes(made: Folded, regions: Sequence[ProgramRegion]) -> list[list[int]]:
    """Return the shapes of the whole values that a check of one region of all ranks creates."""
    first = regions[0]
    if first.call is not None:
        return list(operand_shapes(made, first).values())
    (operand,) = (node for node in first.inputs if edit.is_tensor(node))
    return [change_shape(made, (node for region in regions for node in region.nodes), operand, first.nodes[-1])]


def operand_shapes(made: Folded, region: ProgramRegion) -> dict[str, list[int]]:
    """Return the shapes of a body call's operands, by name, reduced in dims that neither cuts nor numbers refer to.

    A call without a number that is a size behaves the same for any size. So the width of a large vocabulary's embedding
    can be small, which saves memory.
    """
    operands = edit.operands(region.call)
    shapes = {node.name: whole_shape(made, node) for node in operands}
    try:
        rule = rule_of(region.call)
    except RuleError:
        rule = None
    if rule is None or any(_has_sizes(calls) for calls in ([region.call], region.nodes)):
        return shapes
    terms = {node.name: term for node, term in zip(operands, rule.pattern.inputs, strict=True)}
    taken = [node for node in region.inputs if edit.is_tensor(node) and made.whole[node].name in terms]
    ends = [(made.shardings[node][0], terms[made.whole[node].name]) for node in taken]
    for node in region.outputs:
        part = made.whole[node]
        index: Any = 0 if part is region.call else part.args[1]
        ends.append((made.shardings[node][0], rule.pattern.outputs[index]))
    fixed = {f for sharding, term in ends for by, dim in zip(sharding.dims, term, strict=True) if by.axes for f in dim}
    fixed |= {f for term in (*terms.values(), *rule.pattern.outputs) for dim in term if len(dim) > 1 for f in dim}
    fixed |= set(rule.pattern.whole)
    for name, term in terms.items():
        for at, dim in enumerate(term):
            if dim and not fixed.intersection(dim):
                shapes[name][at] = min(shapes[name][at], SMALL)
    return shapes


def change_shape(made: Folded, nodes: Iterable[fx.Node], operand: fx.Node, result: fx.Node) -> list[int]:
    """Return the shape of the value that all ranks' `nodes` change, reduced in the dims that they do not touch.

    So the pending sums of a batch of long texts are reduced on a few numbers.
    """
    shape = whole_shape(made, made.whole[operand])
    cut = {at for end in (operand, result) for at, by in enumerate(made.shardings[end][0].dims) if by.axes}
    for node in nodes:
        if node.target in ALONG_DIM:
            cut.add(int(edit.bound(node)["dim"]) % len(shape))
        elif node.target in ALONG_FIRST:
            cut.add(0)
        elif node.target not in ALONG_NONE:
            return shape
    return [size if at in cut else min(size, SMALL) for at, size in enumerate(shape)]


def _has_sizes(calls: Sequence[fx.Node]) -> bool:
    """Return True if some number may be a size, or add up to one: their sum is not small, or one is unknown."""
    total = 0
    for node in calls:
        arguments: list[Any] = []
        fx.node.map_aggregate((node.args, dict(node.kwargs)), arguments.append)
        if any(isinstance(value, fx.Node) and not edit.outputs(value) for value in arguments):
            return True
        if node.target not in OF_VALUES:
            total += sum(abs(v) for v in arguments if isinstance(v, int) and not isinstance(v, bool))
    return total >= SMALL
