"""Views of results whose layout in memory a trace does not know."""

from __future__ import annotations

from torch import fx

from tpcompiler._torch import aten
from tpcompiler.ir import edit
from tpcompiler.ir.local import is_contiguous

# Fake kernels keep their operand's order of dims in memory; a CPU's keep it of images in channels-last order alone.
NORMS = (
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit_no_training.default,
    aten._batch_norm_with_update_functional.default,
    aten.native_batch_norm_backward.default,
    aten.batch_norm_backward.default,
)


def allow_copies(graph: fx.Graph) -> None:
    """Replace the views by reshapes in a graph with results whose layout in memory is not known.

    The order of dims of such a result spreads through all calls after it; a view of them may not exist.
    """
    norms = (node for node in edit.calls(graph) if node.target in NORMS)
    if any(not is_contiguous(edit.fake(value)) for norm in norms for value in edit.operands(norm)):
        for node in edit.calls(graph):
            edit.allow_copy(node)
