"""The sizes at which pieces of a program are run: numbers for dynamic ones, and small ones if these prove as much."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from tpcompiler._torch import aten, c10d_functional
from tpcompiler.ir import edit
from tpcompiler.judge.sound.folded import Folded
from tpcompiler.judge.sound.region import ProgramRegion
from tpcompiler.judge.sound.unsound import DoesNotRun

SMALL = 16
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


def change_shape(made: Folded, nodes: Iterable[fx.Node], region: ProgramRegion) -> list[int]:
    """Return the shape of the value that a change's `nodes` on all ranks move, reduced in dims that they do not touch.

    So the pending sums of a batch of long texts are reduced on a few numbers.
    """
    last = region.nodes[-1]
    shape = [plain(size, made) for size in edit.outputs(made.whole[last])[0].shape]
    ends = made.paths[last][0], made.paths[last][-1]
    cut = {at for sharding in ends for at, by in enumerate(sharding.dims) if by.axes}
    for node in nodes:
        if node.target in ALONG_DIM:
            cut.add(int(edit.bound(node)["dim"]) % len(shape))
        elif node.target in ALONG_FIRST:
            cut.add(0)
        elif node.target not in ALONG_NONE:
            return shape
    return [size if at in cut else min(size, SMALL) for at, size in enumerate(shape)]
