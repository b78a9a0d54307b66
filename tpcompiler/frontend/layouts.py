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


# Of operands in several orders of dims, kernels take another one for the result's than their fakes.
BACKWARDS = (
    aten.elu_backward.default,
    aten.softplus_backward.default,
    aten.hardswish_backward.default,
    aten.hardtanh_backward.default,
    aten.hardsigmoid_backward.default,
    aten.leaky_relu_backward.default,
    aten.threshold_backward.default,
    aten.logit_backward.default,
    aten.log_sigmoid_backward.default,
    aten._prelu_kernel_backward.default,
    aten.rrelu_with_noise_backward.default,
    aten.native_dropout_backward.default,
    aten._log_softmax_backward_data.default,
    aten.native_layer_norm_backward.default,
    aten.mse_loss_backward.default,
    aten.smooth_l1_loss_backward.default,
    aten.huber_loss_backward.default,
    aten.binary_cross_entropy_backward.default,
)


def allow_copies(graph: fx.Graph) -> None:
    """Replace the views by reshapes in a graph with results whose layout in memory is not known.

    The order of dims of such a result spreads through all calls after it; a view of them may not exist.
    """
    calls = (node for node in edit.calls(graph) if node.target in NORMS + BACKWARDS)
    if any(not is_contiguous(edit.fake(value)) for call in calls for value in edit.operands(call)):
        for node in edit.calls(graph):
            edit.allow_copy(node)
