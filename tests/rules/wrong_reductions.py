"""Rules for reductions, norms, indexing and triangles that look right and are wrong; each must be caught."""

from __future__ import annotations

from typing import Any

import torch

from tests.rules.sample import call, ids, t
from tpcompiler.rules.embedding import _own_bags
from tpcompiler.rules.notation import RuleText, ShardRange

aten = torch.ops.aten


def _triangle(value: torch.Tensor, *, shard: ShardRange) -> torch.Tensor:
    return aten.tril.default(value, -shard.offset)


def _bags_everywhere(*args: Any, shard: ShardRange) -> Any:
    """Every rank holds the statistics, so they are summed up once per rank."""
    bags, *_ = _own_bags(aten._embedding_bag.default, *args, shard=shard)
    return bags, *aten._embedding_bag.default(args[0].new_zeros(6, 1), *args[1:])[1:]


def _unmasked(table: torch.Tensor, id_: torch.Tensor, offsets: torch.Tensor, *rest: Any, shard: ShardRange) -> Any:
    """Ids of other shards look up some row of this one."""
    return aten._embedding_bag.default(table, (id_ - shard.offset).clamp(0, shard.size - 1), offsets, *rest)


def _any_row(table: torch.Tensor, indices: list[torch.Tensor], *, shard: ShardRange) -> torch.Tensor:
    return table[(indices[0] - shard.offset).clamp(0, shard.size - 1)]


GIVEN_BAGS = (t(6, 4), ids(5, below=6), torch.tensor([0, 1]), False, 1)
TWICE = torch.tensor([0, 0, 1, 1, 0, 1])

WRONG_REDUCTIONS = {
    "a sum of products": (call(aten.prod.default, t(6), text=""), RuleText("d0 ->")),
    "a Partial through a product": (
        call(aten.prod.dim_int, t(4, 6), 1, text=""),
        RuleText("d0 d1! -> d0", linear=((0,),)),
    ),
    "a sum of norms": (call(aten.linalg_vector_norm.default, t(4, 6), 2, [1], text=""), RuleText("d0 d1 -> d0")),
    "a Partial through a norm": (
        call(aten.linalg_vector_norm.default, t(4, 6), 1, [1], text=""),
        RuleText("d0 d1 -> d0", linear=((0,),)),
    ),
    "a sum of shares cut to integers": (
        call(aten.sum.dim_IntList, 9 * t(4, 6), [1], dtype=torch.int64, text=""),
        RuleText("d0 d1 -> d0", linear=((0,),)),
    ),
    "the place of a maximum in a shard": (
        call(aten.max.dim, t(4, 6), 1, text=""),
        RuleText("d0 d1 -> d0, d0", reduce="max"),
    ),
    "a variance of shards": (call(aten.var.correction, t(4, 6), [1], text=""), RuleText("d0 d1 -> d0", reduce="avg")),
    "a running sum over a cut dim": (
        call(aten.cumsum.default, t(4, 6), 1, text=""),
        RuleText("d0 d1 -> d0 d1", linear=((0,),)),
    ),
    "a Partial through a running product": (
        call(aten.cumprod.default, t(4, 6), 1, text=""),
        RuleText("d0 d1! -> d0 d1!", linear=((0,),)),
    ),
    "a sort of shards": (call(aten.sort.default, t(4, 6), 1, text=""), RuleText("d0 d1 -> d0 d1, d0 d1")),
    "the largest of shards": (call(aten.topk.default, t(6, 4), 2, 0, text=""), RuleText("d0 d1 -> k d1, k d1")),
    "counts in a range that data give": (call(aten.histc.default, t(12), 4, text=""), RuleText("d0 -> b")),
    "distances over cut coordinates": (
        call(aten._cdist_forward.default, t(4, 6), t(3, 6), 2.0, None, text=""),
        RuleText("m k, n k -> m n"),
    ),
    "distances of pairs over cut coordinates": (
        call(aten._pdist_forward.default, t(4, 6), text=""),
        RuleText("n! k -> q!"),
    ),
    "a sum of greatest distances": (
        call(aten._pdist_forward.default, t(4, 6), float("inf"), text=""),
        RuleText("n! k -> q!"),
    ),
    "pairs of the rows of a shard": (
        call(aten._pdist_forward.default, t(6, 4), 1.0, text=""),
        RuleText("n k! -> q!"),
    ),
    "groups that are told the number of all": (
        call(aten.group_norm.default, t(4, 12, 3), 6, text=""),
        RuleText("n (g c!) s! -> n (g c!) s!", factors={"g": 6}),
    ),
    "a group cut in itself": (call(aten.group_norm.default, t(4, 8, 3), 2, text=""), RuleText("n c s! -> n c s!")),
    "statistics of a cut batch": (
        call(aten._native_batch_norm_legit.no_stats, t(6, 4), None, None, True, 0.1, 1e-5, text=""),
        RuleText("n c! -> n c!, c!, c!"),
    ),
    "added to once per rank": (
        call(aten.scatter_add.default, t(4, 5), 0, ids(6, 5, below=4), t(6, 5), text=""),
        RuleText("d0! d1, i d1, i d1 -> d0! d1"),
    ),
    "values put once per rank": (
        call(aten.index_put.default, t(4, 5), [ids(6, below=4)], t(6, 5), True, text=""),
        RuleText("d0! d1, i, i d1 -> d0! d1"),
    ),
    "the last value put, summed": (
        call(aten.index_put.default, t(4, 5), [TWICE], t(6, 5), text=""),
        RuleText("+d0! d1, i, i d1 -> d0! d1"),
    ),
    "an extremum with what was to go": (
        call(aten.scatter_reduce.two, t(3).abs() + 9, 0, TWICE, t(6), "amax", include_self=False, text=""),
        RuleText("d0!, i, i -> d0!", reduce="max"),
    ),
    "a Partial through an extremum": (
        call(aten.scatter_reduce.two, t(3), 0, TWICE, t(6), "amax", text=""),
        RuleText("d0!, i!, i! -> d0!", linear=((0, 2),)),
    ),
    "rows of other shards": (
        call(aten.index.Tensor, t(6, 4), [ids(5, below=6)], text=""),
        RuleText("d0 d1!, i! -> i! d1!", local={"d0": _any_row}),
    ),
    "a triangle of every block": (call(aten.tril.default, t(6, 6), text=""), RuleText("d0 d1! -> d0 d1!")),
    "a diagonal moved the wrong way": (
        call(aten.tril.default, t(6, 6), text=""),
        RuleText("d0 d1! -> d0 d1!", local={"d0": _triangle}),
    ),
    "statistics of bags once per rank": (
        call(aten._embedding_bag.default, *GIVEN_BAGS, text=""),
        RuleText("v d!, i!, o! -> b! d!, x!, y!, z!", local={"v": _bags_everywhere}),
    ),
    "rows of other shards in a bag": (
        call(aten._embedding_bag.default, *GIVEN_BAGS, text=""),
        RuleText("v d!, i!, o! -> b! d!, x!, y!, z!", local={"v": _unmasked}),
    ),
}
