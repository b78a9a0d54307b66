"""torch's op database, and the ops of it that the ordinary tests run: those whose rules are most easily wrong."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.testing._internal import common_utils
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo import core

from tests.op_db.record import Call, record

# For each sample, torch searches all frames and modules for a test to name in its errors: nine tenths of the time.
common_utils.extract_test_fn = core.extract_test_fn = lambda: None

# Sums with addends, merged dims, broadcasts, positions, statistics, windows; and what takes or gives several tensors.
_RISKY = """
    addbmm addmm addmv addr baddbmm bmm matmul einsum nn.functional.linear nn.functional.bilinear tensordot outer kron
    nn.functional.conv1d nn.functional.conv2d nn.functional.conv_transpose2d nn.functional.unfold
    nn.functional.scaled_dot_product_attention nn.functional.embedding nn.functional.embedding_bag
    softmax log_softmax nn.functional.layer_norm nn.functional.group_norm nn.functional.batch_norm nn.functional.rms_norm
    sum mean amax amin prod var std std_mean norm logsumexp cumsum sort topk argmax all any
    gather scatter scatter_add scatter_reduce.sum index_add index_copy index_put index_select index_fill take_along_dim
    view reshape expand permute transpose squeeze unsqueeze unflatten flatten repeat repeat_interleave tile
    cat stack split split_with_sizes chunk unbind roll flip tril triu diagonal narrow select_scatter slice_scatter
    add sub mul div where masked_fill addcmul lerp clamp clone to
    nn.functional.max_pool2d nn.functional.avg_pool2d nn.functional.adaptive_avg_pool2d nn.functional.cross_entropy
"""
RISKY = _RISKY.split()
# Through the whole, each takes two to four seconds.
WHOLE = ["matmul", "nn.functional.linear", "softmax", "scatter_add", "cat", "view"]


def name_of(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


def ops_named(names: list[str]) -> dict[str, Any]:
    """Those of the database, by name; a name that torch no longer has is left out."""
    found = {name_of(op): op for op in op_db}
    return {name: found[name] for name in names if name in found}


def calls(op: Any, most: int | None = None) -> Iterator[Call]:
    """The calls of its samples in float64 and in float32; with `most`, of the first samples in the wider of the two."""
    for dtype in [d for d in (torch.float64, torch.float32) if op.supports_dtype(d, "cpu")][: 2 if most is None else 1]:
        for sample in itertools.islice(op.sample_inputs("cpu", dtype), most):
            yield from record(lambda s=sample: op.op(s.input, *s.args, **s.kwargs))  # type: ignore[misc]
