"""Table look-ups."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from tpcompiler.ir import edit
from tpcompiler.rules.notation import RuleText, ShardRange
from tpcompiler.rules.registry import op_rule

aten = torch.ops.aten

MAX = 2  # of the modes sum, mean and max


def _own_rows(table: torch.Tensor, indices: torch.Tensor, *args: Any, shard: ShardRange) -> torch.Tensor:
    """The rows that this shard of the table holds, zeros for the others, so that the sum over ranks is the look-up."""
    local = indices - shard.offset
    absent = (local < 0) | (local >= shard.size)
    rows = aten.embedding.default(table, torch.where(absent, 0, local), *args)
    return torch.where(absent.unsqueeze(-1), 0.0, rows)


@op_rule(aten.embedding.default, shards="any")
def embedding(node: fx.Node) -> RuleText:
    """ "v d, i0 i1 -> i0 i1 d": with the vocabulary v cut, each rank looks up its own rows: Partial(sum)."""
    ids = " ".join(f"i{d}" for d in range(edit.operands(node)[1].meta["val"].ndim))
    return RuleText(f"v d, {ids} -> {ids} d", linear=((0,),), local={"v": _own_rows})


@op_rule(aten._embedding_bag.default, shards="any")
def bags(node: fx.Node) -> str:
    """ "v! d, i!, o! -> b d, ..": features are independent. A bag's ids lie anywhere, so ids and bags stay whole.

    Beside the bags stand statistics: of the features too where a maximum is taken (each one's row), else of the bags.
    """
    operands = edit.operands(node)
    terms = ["v! d", "i!", "o!", "i!"][: len(operands)]
    made = ["b! d", *(f"x{i}!" for i in range(len(edit.outputs(node)) - 1))]
    if edit.bound(node)["mode"] == MAX:
        made[-1] = "b! d"
    return f"{', '.join(terms)} -> {', '.join(made)}"
