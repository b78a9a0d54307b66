"""Table look-ups."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import fx

from tpcompiler._torch import OpOverload, aten
from tpcompiler.ir import edit
from tpcompiler.rules.indexing import can_look_up
from tpcompiler.rules.notation import RuleText, ShardRange
from tpcompiler.rules.registry import op_rule

SUM, MEAN, MAX = range(3)  # modes of a bag


def _own_rows(table: torch.Tensor, indices: torch.Tensor, *args: Any, shard: ShardRange) -> torch.Tensor:
    """Look up the rows that this shard of the table has, zeros for others, so that the ranks' sum is the look-up."""
    local = indices - shard.offset
    absent = (local < 0) | (local >= shard.size)
    rows: torch.Tensor = aten.embedding.default(table, torch.where(absent, 0, local), *args)
    return rows.masked_fill(absent.unsqueeze(-1), 0)


@op_rule(aten.embedding.default, shards="any")
def embedding(node: fx.Node) -> RuleText:
    """ "v d, i0 i1 -> i0 i1 d": with the vocabulary v sharded, each rank looks up its own rows: Partial(sum)."""
    table, indices = edit.operands(node)
    ids = " ".join(f"i{d}" for d in range(edit.ndim(indices)))
    free = can_look_up(table, 0)
    text = f"{'v' if free else 'v!'} d, {ids} -> {ids} d"
    return RuleText(text, linear=((0,),), local={"v": _own_rows} if free else {}, positions={"v": (1, False)})


def _gradients_of_own_rows(
    grad: torch.Tensor,
    indices: torch.Tensor,
    num_weights: int,
    padding_idx: int,
    scale_grad_by_freq: bool,
    *,
    shard: ShardRange,
) -> torch.Tensor:
    """Sum the gradients of the rows that this shard of the table has."""
    local = indices - shard.offset
    absent = (local < 0) | (local >= shard.size) | (indices == padding_idx)
    own, at = grad.masked_fill(absent.unsqueeze(-1), 0), torch.where(absent, 0, local)
    rows: torch.Tensor = aten.embedding_dense_backward.default(own, at, shard.size, -1, scale_grad_by_freq)
    return rows


@op_rule(aten.embedding_dense_backward.default, shards="any")
def embedding_backward(node: fx.Node) -> RuleText:
    """ "i0 i1 d, i0 i1 -> v d": each look-up adds to a row of v, or a part by the number of all look-ups of the row."""
    by_frequency = edit.bound(node)["scale_grad_by_freq"]
    ids = [f"i{d}{'!' if by_frequency else ''}" for d in range(edit.ndim(edit.operands(node)[1]))]
    free = can_look_up(node, 0) and not by_frequency
    return RuleText(
        f"{' '.join([*ids, 'd'])}, {' '.join(ids)} -> {'v' if free else 'v!'} d",
        linear=((0,),),
        local={"v": _gradients_of_own_rows} if free else {},
        positions={"v": (1, False)} if free else {},
        counts={"num_weights": (("v",),)},
    )


def _own_bags(
    look_up: OpOverload,
    table: torch.Tensor,
    ids: torch.Tensor,
    offsets: torch.Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = SUM,
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
    *,
    shard: ShardRange,
) -> tuple[torch.Tensor, ...]:
    """Compute this shard's part of every bag by `look_up`: ids of other shards, and padding, count as zeros.

    They become zeros before weighting, because the row read in their place may hold NaN or an infinity. The statistics
    do not depend on the table, but their sizes depend on the look-up; the first shard holds them, the others hold
    zeros. A mean is divided by the number of ids in the statistics.
    """
    padding = ids == padding_idx if padding_idx >= 0 else torch.zeros_like(ids, dtype=torch.bool)
    last = (include_last_offset, 1 if padding_idx >= 0 else -1)
    _, bag_of_id, counts, rows = look_up(
        table.new_zeros(2, 1), padding.to(ids.dtype), offsets, scale_grad_by_freq, mode, sparse, None, *last
    )
    local = ids - shard.offset
    absent = (local < 0) | (local >= shard.size)
    own = torch.ones_like(ids, dtype=table.dtype) if per_sample_weights is None else per_sample_weights
    own = torch.where(absent | padding, 0.0, own)
    rows_of_ids = aten.embedding.default(table, torch.where(absent, 0, local))
    rows_of_ids = rows_of_ids.masked_fill((absent | padding).unsqueeze(-1), 0)
    each = torch.arange(ids.shape[0], dtype=ids.dtype, device=ids.device)
    bags = look_up(rows_of_ids, each, offsets, scale_grad_by_freq, SUM, sparse, own, include_last_offset)[0]
    if mode == MEAN:
        bags = bags / counts[: bags.shape[0]].clamp(min=1).unsqueeze(-1)
    return bags, *(part * (shard.offset == 0) for part in (bag_of_id, counts, rows))


_BODIES = {op: partial(_own_bags, op) for op in (aten._embedding_bag.default, aten._embedding_bag_forward_only.default)}


@op_rule(*_BODIES, shards="any")
def bags(node: fx.Node) -> RuleText:
    """ "v d, i!, o! -> b d, ..": with rows sharded, each rank sums its own: Partial(sum). A maximum needs all rows.

    Features are independent. A bag may have any ids, so ids and bags stay whole. The other outputs are statistics of
    the bags; for a maximum one of them has features too (each one's row). Linear in the table, but the statistics are
    not.
    """
    operands = edit.operands(node)
    largest = edit.arguments(node).mode == MAX
    terms = ["v! d" if largest else "v d", "i!", "o!", "i!"][: len(operands)]
    results = ["b! d", *(f"x{i}!" for i in range(len(edit.outputs(node)) - 1))]
    if largest:
        results[-1] = "b! d"
    body = _BODIES[node.target]
    text = f"{', '.join(terms)} -> {', '.join(results)}"
    return RuleText(text, local={} if largest else {"v": body}, positions={"v": (1, False)})
