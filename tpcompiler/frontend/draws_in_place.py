"""Draws into memory that has gaps or is not row-major, in the order of the CPU's kernels.

torch's functional forms of `bernoulli_` and `normal_` draw for dense row-major memory, which gives other numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from tpcompiler._torch import aten, graph_modules
from tpcompiler.errors import UnsupportedError
from tpcompiler.ir import edit
from tpcompiler.ir.local import is_contiguous, memory_order

ONE_BY_ONE = 16  # `normal_` fills shorter or non-contiguous memory number by number, and the rest in blocks


def refuse_dynamic_gaps(program: ExportedProgram) -> None:
    """Check that a slice into which `normal_` draws has a known size.

    Raises:
        UnsupportedError: its size is dynamic.
    """
    for each in graph_modules(program.graph_module):
        for node in edit.calls(each.graph):
            value = edit.fake(edit.operands(node)[0]) if node.target is aten.normal_.default else None
            if value is not None and _has_gaps(value) and not isinstance(value.numel(), int):
                raise UnsupportedError(
                    f"'{node.name}' ({node.target}) draws into a slice of {value.numel()} numbers: what it draws "
                    "depends on how many there are",
                    help="draw with torch.randn_like and copy it into the slice, or export with static sizes",
                    used_at=edit.source_line(node),
                )


def is_dense_draw(node: fx.Node) -> bool:
    """Return True if a call draws for row-major memory although its operand's is not, so it is already functional."""
    if node.target not in AS_DRAWN:
        return False
    value = edit.fake(edit.operands(node)[0])
    return not is_contiguous(value) and (node.target is aten.bernoulli.p or _has_gaps(value))


def _bernoulli(x: torch.Tensor, p: float = 0.5, *, generator: Any = None) -> Any:
    """Draw in the memory order of the operand."""
    order = memory_order(x)
    if order == sorted(order):
        return NotImplemented
    drawn = aten.bernoulli.p(x.permute(order), p, generator=generator)
    return drawn.permute([order.index(dim) for dim in range(x.ndim)])


def _normal(x: torch.Tensor, mean: float = 0.0, std: float = 1.0, *, generator: Any = None) -> Any:
    """Draw number by number, as torch does for non-contiguous memory: two columns, and an odd last number."""
    count: Any = x.numel()
    if not isinstance(count, int) or count < ONE_BY_ONE or not _has_gaps(x):
        return NotImplemented
    columns = aten.normal_functional.default(x.new_ones(count // 2, 2).t(), mean, std, generator=generator)
    drawn = columns.t().reshape(-1)
    if count % 2:
        last = aten.normal_functional.default(x.new_ones(1), mean, std, generator=generator)
        drawn = torch.cat([drawn, last])
    return drawn.view(x.shape)


def _has_gaps(x: torch.Tensor) -> bool:
    """Return True if `x` is not contiguous but a copy of it is."""
    return not is_contiguous(x) and is_contiguous(torch.empty_like(x))


AS_DRAWN: Mapping[Any, Callable[..., Any]] = {
    aten.bernoulli.p: _bernoulli,
    aten.normal_functional.default: _normal,
}
