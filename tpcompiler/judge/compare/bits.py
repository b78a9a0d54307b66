"""Views of bits (`x.view(torch.int32)`) in a promoted dtype, in which a value and its bits cannot share memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from tpcompiler._torch import aten
from tpcompiler.frontend.written_back import memory_of, writes
from tpcompiler.ir import edit

READS_BITS = aten.view.dtype


def keep_bits_in_step(graph: fx.Graph) -> None:
    """Copy every write to a value over to its bits, and every write to the bits over to the value.

    Before    bits = view(x, int32); zero_(bits)
    After     bits = view(x, int32); zero_(bits); _copy_bits(bits, x)      x is in float64
    """
    views: list[fx.Node] = []
    for node in edit.calls(graph):
        if node.target is READS_BITS:
            views.append(node)
        elif views and writes(node):
            target = edit.operands(node)[0]
            above = [each for each in _chain(target) if each in views]
            siblings = [each for each in views if each not in above and memory_of(each) is memory_of(target)]
            pairs = [(each, each.args[0]) for each in above] + [(each.args[0], each) for each in siblings]
            for source, to in reversed(pairs):  # each is inserted right after the call
                dtypes = [edit.fake(each).dtype for each in (source, to)]  # type: ignore[arg-type]
                edit.insert_after(node, _copy_bits, (source, to, *dtypes), "bits")


def _chain(value: Any) -> Iterator[fx.Node]:
    """Yield a value, the value that it is a view of, and so on."""
    while isinstance(value, fx.Node):
        yield value
        value = value.args[0] if value.op == "call_function" and value.args else None


def _copy_bits(source: torch.Tensor, target: torch.Tensor, exported: torch.dtype, others: torch.dtype) -> None:
    """Write the bits of `source` in its exported dtype to `target`, in the other's."""
    target.copy_(source.to(exported).view(others))
