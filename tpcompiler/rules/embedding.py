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
    """The rows that this shard of the table holds, zeros for the others, so that the sum over ranks is the look-up."""
    local = indices - shard.offset
    absent = (local < 0) | (local >= shard.size)
    rows: torch.Tensor = aten.embedding.default(table, torch.where(absent, 0, local), *args)
    return rows.masked_fill(absent.unsqueeze(-1), 0)


@op_rule(aten.embedding.default, shards="any")
def embedding(node: fx.Node) -> RuleText:
    """ "v d, i0 i1 -> i0 i1 d": with the vocabulary v cut, each rank looks up its own rows: Partial(sum)."""
    table, indices = edit.operands(node)
    ids = " ".join(f"i{d}" for d in range(indices.meta["val"].ndim))
    free = can_look_up(table, 0)
    text = f"{'v' if free else 'v!'} d, {ids} -> {ids} d"
    return RuleText(text, linear=((0,),), local={"v": _own_rows} if free else {}, positions={"v": (1, False)})


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
    """This shard's part of every bag, by `look_up`: zeros for ids of other shards, and for padding.

    They are zeros before they are weighted, because the row that is read for them may hold NaN or an infinity. The
    statistics do not depend on the table, and their sizes on the look-up; the first shard holds them, the others hold
    zeros. A mean is divided by the ids that they count.
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
    found = aten.embedding.default(table, torch.where(absent, 0, local))
    found = found.masked_fill((absent | padding).unsqueeze(-1), 0)
    each = torch.arange(ids.shape[0], dtype=ids.dtype, device=ids.device)
    bags = look_up(found, each, offsets, scale_grad_by_freq, SUM, sparse, own, include_last_offset)[0]
    if mode == MEAN:
        bags = bags / counts[: bags.shape[0]].clamp(min=1).unsqueeze(-1)
    return bags, *(part * (shard.offset == 0) for part in (bag_of_id, counts, rows))


_BODIES = {op: partial(_own_bags, op) for op in (aten._embedding_bag.default, aten._embedding_bag_forward_only.default)}


@op_rule(*_BODIES, shards="any")
def bags(node: fx.Node) -> RuleText:
    """ "v d, i!, o! -> b d, ..": with rows cut, each rank sums up its own: Partial(sum). A maximum needs all rows.

    Features are independent. A bag's ids lie anywhere, so ids and bags stay whole. Beside the bags stand statistics: of
    the features too where a maximum is taken (each one's row), else of the bags. Linear in the table, but they are not.
    """
    operands = edit.operands(node)
    largest = edit.bound(node)["mode"] == MAX
    terms = ["v! d" if largest else "v d", "i!", "o!", "i!"][: len(operands)]
    made = ["b! d", *(f"x{i}!" for i in range(len(edit.outputs(node)) - 1))]
    if largest:
        made[-1] = "b! d"
    body = _BODIES[node.target]
    text = f"{', '.join(terms)} -> {', '.join(made)}"
    return RuleText(text, local={} if largest else {"v": body}, positions={"v": (1, False)})
