"""Integer operands that must rise: starts of bags of ids, and ends of groups of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from tpcompiler._torch import OpOverload, aten
from tpcompiler.ir import edit
from tpcompiler.rules.experts import BY_BLOCK
from tpcompiler.rules.index_range import SAME_VALUES

BAGS = (aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
GROUPED = ("aten._grouped_mm.default", "transformers.grouped_mm_fallback.default")


@dataclass(frozen=True)
class Rising:
    """A call's operand with rising positions in a dim of another operand.

    Kernels do not check them: other values make torch read any memory, or leave rows of the result uninitialised.

    Attributes:
        fixed: the known position: the `first` is 0, or the `last` is the size of the dim.
    """

    places: fx.Node
    of: fx.Node
    dim: int
    fixed: str = ""

    def draw(self, value: torch.Tensor, shape: Sequence[int], size: int) -> torch.Tensor:
        """Return random positions in a dim of this size; runs between them may be empty."""
        places = torch.randint(size + 1, tuple(shape)).sort().values
        if self.fixed == "first":
            places[..., :1] = 0
        elif self.fixed == "last":
            places[..., -1:] = size
        return places.to(value.dtype)


def find_rising(call: fx.Node) -> Rising | None:
    """Return the operand of a call that must rise, if there is one."""
    target = call.target
    if not isinstance(target, OpOverload):
        return None
    if target in BAGS:
        bound = edit.bound(call)
        return Rising(bound["offsets"], bound["indices"], 0, "first")
    if target is BY_BLOCK:
        bound = edit.bound(call)
        return Rising(bound["ends"], bound["x"], 1)
    if str(target) in GROUPED and len(operands := edit.operands(call)) >= 3:
        left, right, ends = operands[:3]
        dims = edit.ndim(left), edit.ndim(right)
        of, dim = {(2, 3): (left, 0), (2, 2): (left, 1), (3, 2): (right, 1)}[dims]
        return Rising(ends, of, dim, "last")
    return None


def rising_inputs(graph: fx.Graph) -> Mapping[str, tuple[Rising, bool]]:
    """Return the inputs with such positions by name, with True for inputs whose running sum has them."""
    inputs = {}
    for call in edit.calls(graph):
        if (rising := find_rising(call)) is not None:
            node, counted = rising.places, False
            while node.op == "call_function" and (node.target in SAME_VALUES or node.target is aten.cumsum.default):
                counted |= node.target is aten.cumsum.default
                node = edit.operands(node)[0]
            if node.op == "placeholder":
                inputs[node.name] = rising, counted
    return inputs


def counting(graph: fx.Graph) -> set[fx.Node]:
    """Return the floats that are computed from integers alone, such as counts of each integer.

    No random float may replace one, because other ops may use the same integers.
    """
    counts: set[fx.Node] = set()
    for node in edit.calls(graph):
        used = [(each, value.dtype) for each in node.all_input_nodes for value in edit.outputs(each)]
        integers = [is_integer(dtype) or each in counts for each, dtype in used]
        if any(integers) and all(it or dtype == torch.bool for it, (_, dtype) in zip(integers, used, strict=True)):
            counts.update([node] if any(not is_integer(value.dtype) for value in edit.outputs(node)) else ())
    return counts


def is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
