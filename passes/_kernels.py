"""The kernels that attend and also give the log-sum-exp of each query's scores: every device has another."""

from __future__ import annotations

from typing import Any

from torch import fx

from tpcompiler._torch import OpOverload, aten
from tpcompiler.ir import edit
from tpcompiler.ir.sizes import statically_equal

ON_CPU = aten._scaled_dot_product_flash_attention_for_cpu.default
ON_CUDA = aten._scaled_dot_product_efficient_attention.default
# Of what each takes a multiple: steps of queries (log-sum-exps may be padded to it), of keys, features.
MULTIPLES = {"cpu": (1, 1, 1), "cuda": (32, 8, 8)}

Call = tuple[OpOverload, tuple[Any, ...], dict[str, Any]]


def kernel_for(node: fx.Node, device_type: str) -> Call | None:
    """The call that does on a device what one of these kernels does on another; None for any other call."""
    if node.target is ON_CPU and device_type == "cuda":
        return _on_cuda(node)
    return _on_cpu(node) if node.target is ON_CUDA and device_type == "cpu" else None


def _on_cuda(node: fx.Node) -> Call:
    args = edit.bound(node)
    given = (args["query"], args["key"], args["value"], args["attn_mask"], True, args["dropout_p"], args["is_causal"])
    return ON_CUDA, given, {"scale": args["scale"]}


def _on_cpu(node: fx.Node) -> Call | None:
    """None where something is used that the CPU's does not give: padded sums, or what its random numbers came from."""
    args, sums = edit.bound(node), edit.outputs(node)[1]
    used = {part.args[1] for part in node.users if part.users}
    if not used <= {0, 1} or not statically_equal(sums.shape[-1], args["query"].meta["val"].shape[2]):
        return None
    given = (args["query"], args["key"], args["value"], args["dropout_p"], args["is_causal"])
    return ON_CPU, given, {"attn_mask": args["attn_bias"], "scale": args["scale"]}
