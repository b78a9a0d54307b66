"""Slices in canonical form."""

from __future__ import annotations

from torch import fx

from tpcompiler._torch import aten
from tpcompiler.ir import edit


def count_from_the_start(graph: fx.Graph) -> None:
    """Replace negative starts and ends of slices, which count from the end: of a shard, that is somewhere else."""
    for node in edit.calls(graph):
        if node.target not in (aten.slice.Tensor, aten.slice_copy.Tensor, aten.slice_scatter.default):
            continue
        args = edit.bound(node)
        size = edit.shape(edit.operands(node)[0])[args["dim"]]
        for name in ("start", "end"):
            if isinstance(size, int) and isinstance(args[name], int) and args[name] < 0:
                edit.set_argument(node, name, max(0, args[name] + size))
