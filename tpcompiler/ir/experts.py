"""Grouped matmul in blocks: every rank computes the groups that it holds."""

from __future__ import annotations

from typing import Any

import torch

from tpcompiler._torch import define_op, find_op


def multiply_blocks(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, kernel: str) -> torch.Tensor:
    """Run a grouped matmul per block; rows after a block's last group are zeros.

    Args:
        x: [blocks, rows, k], each block's rows in the order of its groups.
        weight: [blocks x groups, k, n].
        ends: [blocks, groups], int32: the end of each group in its block.
        kernel: the op that computes one block.
    """
    own = weight.reshape(*ends.shape, *weight.shape[1:])
    rows = torch.ones_like(x[0, :, 0], dtype=torch.int32).cumsum(0)  # from 1; their number is dynamic
    results = [find_op(kernel)(x[block], own[block], ends[block]) for block in range(ends.shape[0])]
    masked = [part.masked_fill((rows > ends[block, -1]).unsqueeze(-1), 0) for block, part in enumerate(results)]
    return torch.stack(masked)


def multiply_own_blocks(
    x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, kernel: str, *, shard: Any
) -> torch.Tensor:
    """Compute the blocks that this rank holds."""
    return multiply_blocks(x, weight, ends, kernel)


def _fake(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, kernel: str) -> torch.Tensor:
    return x.new_empty(x.shape[0], x.shape[1], weight.shape[2])


BY_BLOCK = define_op(
    "grouped_mm_by_block(Tensor x, Tensor weight, Tensor ends, str kernel) -> Tensor", multiply_blocks, _fake
)
