"""Integer operands that must rise: where bags of ids begin, and where groups of rows end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tpcompiler._torch import OpOverload, aten
from tpcompiler.ir import edit
from tpcompiler.ir.experts import BY_BLOCK
from tpcompiler.rules.index_range import SAME_VALUES

BAGS = (aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
GROUPED = ("aten._grouped_mm.default", "transformers.grouped_mm_fallback.default")


@dataclass(frozen=True)
class Rising:
    """A call's operand of positions in a dim of another operand, in order.

    Kernels do not check them: other values make torch read anywhere, or leave rows of the result uninitialised.

    Attributes:
        fixed: the one that is known: the `first` is 0, or the `last` is the size of the dim.
    """

    places: fx.Node
    of: fx.Node
    dim: int
    fixed: str = ""

    def draw(self, value: torch.Tensor, shape: Sequence[int], size: int, generator: torch.Generator | None) -> Any:
        """Return random positions in a dim of this size; runs between them may be empty."""
        places = torch.randint(size + 1, tuple(shape), generator=generator).sort().values
        if self.fixed == "first":
            places[..., :1] = 0
        elif self.fixed == "last":
            places[..., -1:] = size
        return places.to(value.dtype)


def find_rising(call: fx.Node) -> Rising | None:
    """The operand of a call that must rise, if there is one."""
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
        dims = left.meta["val"].ndim, right.meta["val"].ndim
        of, dim = {(2, 3): (left, 0), (2, 2): (left, 1), (3, 2): (right, 1)}[dims]
        return Rising(ends, of, dim, "last")
    return None


def rising_inputs(graph: fx.Graph) -> Mapping[str, tuple[Rising, bool]]:
    """The inputs that hold such positions, by name; and True for those whose running sum does."""
    found = {}
    for call in edit.calls(graph):
        if (rising := find_rising(call)) is not None:
            node, counted = rising.places, False
            while node.op == "call_function" and (node.target in SAME_VALUES or node.target is aten.cumsum.default):
                counted |= node.target is aten.cumsum.default
                node = edit.operands(node)[0]
            if node.op == "placeholder":
                found[node.name] = rising, counted
    return found


def counting(graph: fx.Graph) -> set[fx.Node]:
    """The floats that are computed from integers alone, such as how often each of them occurs: no other float may stand
    for one, as the integers may be used beside it."""
    found: set[fx.Node] = set()
    for node in edit.calls(graph):
        used = [(each, value.dtype) for each in node.all_input_nodes for value in edit.outputs(each)]
        integers = [is_integer(dtype) or each in found for each, dtype in used]
        if any(integers) and all(it or dtype == torch.bool for it, (_, dtype) in zip(integers, used, strict=True)):
            found.update([node] if any(not is_integer(value.dtype) for value in edit.outputs(node)) else ())
    return found


def is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
