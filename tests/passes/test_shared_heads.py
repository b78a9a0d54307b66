"""Attention over few, odd and shared heads: one sum and no gather, whatever the numbers of heads and ranks are."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim, export

import tpcompiler
from tests.compared import compare
from tests.zoo.case import randomise
from tpcompiler import ParallelProgram
from tpcompiler.cost.machine_file import read_machine
from tpcompiler.parallel.program_subject import layout_of

WIDTH, HEAD = 16, 4
X = torch.randn(4, 3, WIDTH)
SEPARATE = {"q": "colwise", "k": "colwise", "v": "colwise", "o": "rowwise"}
PACKED = {"qkv": "colwise", "o": "rowwise"}
# (heads, kv heads, ranks) -> (query heads, kv heads) of the rank that holds most parameters.
HEADS = {
    (8, 2, 2): (4, 1),
    (8, 2, 4): (2, 1),
    (8, 2, 8): (1, 1),
    (8, 1, 2): (4, 1),
    (8, 1, 4): (2, 1),
    (8, 1, 8): (1, 1),
    (6, 3, 2): (4, 2),  # a kv head goes with its queries
    (6, 3, 4): (2, 1),  # and one rank has none
    (9, 3, 2): (6, 2),
    (9, 3, 4): (3, 1),
    (28, 4, 8): (4, 1),  # 7 queries of a kv head lie 4 and 3
}


class Attention(nn.Module):
    def __init__(self, heads: int, groups: int, packed: bool) -> None:
        super().__init__()
        self.sizes = [heads * HEAD, groups * HEAD, groups * HEAD]
        if packed:
            self.qkv = nn.Linear(WIDTH, sum(self.sizes))
        else:
            self.q, self.k, self.v = (nn.Linear(WIDTH, size) for size in self.sizes)
        self.o = nn.Linear(heads * HEAD, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.qkv(x).split(self.sizes, -1) if hasattr(self, "qkv") else (self.q(x), self.k(x), self.v(x))
        q, k, v = (part.view(*x.shape[:2], -1, HEAD).transpose(1, 2) for part in made)
        q, k = (part + torch.cat([-part[..., HEAD // 2 :], part[..., : HEAD // 2]], -1) for part in (q, k))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return x + self.o(seen.transpose(1, 2).reshape(*x.shape[:2], -1))


def converted(heads: int, groups: int, world: int, packed: bool, dynamic: bool) -> ParallelProgram:
    sizes = {"x": {0: Dim("batch", max=64), 1: Dim("sequence", max=64)}} if dynamic else None
    model = randomise(Attention(heads, groups, packed))
    return tpcompiler.parallelize(export(model, (X,), dynamic_shapes=sizes), world, PACKED if packed else SEPARATE)


def _sums(made: ParallelProgram) -> list[tuple[str, str]]:
    return [(each.kind, each.why) for each in made.collectives()]


ONE = [("all_reduce", "inherent")]


@pytest.mark.slow
@pytest.mark.sweep(13)
@pytest.mark.parametrize(("sizes", "packed", "dynamic"), list(itertools.product(HEADS, (False, True), (False, True))))
def test_one_sum(sizes: tuple[int, int, int], packed: bool, dynamic: bool) -> None:
    heads, groups, world = sizes
    made = converted(heads, groups, world, packed, dynamic)
    queries, keys = HEADS[heads, groups, world]
    assert made.verify((X,)).ok
    if dynamic:
        assert made.verify((torch.randn(3, 5, WIDTH),)).ok
    if _sums(made) != ONE:  # where bytes alone have a price, ranks may share the work behind the sum, too
        other = converted(heads, groups, world, packed, True)
        assert _sums(other) == ONE
        assert made.converted.predict(read_machine()).total.total < other.converted.predict(read_machine()).total.total
    features = (queries + 2 * keys) * HEAD
    held = features * (WIDTH + 1) + queries * HEAD * WIDTH + WIDTH
    assert max(made.parameter_bytes()[1]) <= 4 * held


def test_which_ranks_share_a_head() -> None:
    """Ranks 0 and 1 hold the first kv head, 2 and 3 the second; a negative control: exchanged, the numbers are wrong."""
    made = converted(8, 2, 4, False, False)
    ranks = [made.rank_program(rank) for rank in range(4)]
    weights = [program.state_dict["k.weight"] for program in ranks]
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[2], weights[3])
    ranks[0].state_dict["k.weight"] = weights[2]
    names = made.converted.resharded.output_names()
    report = compare(made.only.original(), ranks, (X,), {}, layout_of(made.only), ["x"], names)
    assert not report.ok


class Vocabulary(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(rows, WIDTH), nn.Linear(WIDTH, rows, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(ids))


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("rows", [259, 50257])
@pytest.mark.parametrize("dynamic", [False, True])
def test_an_odd_vocabulary(rows: int, dynamic: bool) -> None:
    """Four ranks; the rows are summed, the logits gathered as the plan says."""
    ids = torch.arange(12).view(3, 4) * (rows // 12)
    sizes = {"ids": {0: Dim("batch", max=64), 1: Dim("sequence", max=64)}} if dynamic else None
    program = export(randomise(Vocabulary(rows)), (ids,), dynamic_shapes=sizes)
    made = tpcompiler.parallelize(program, 4, {"table": "embedding_rowwise", "head": "colwise_gather_output"})
    assert [(c.kind, c.why) for c in made.collectives()] == [
        ("all_reduce", "inherent"),
        ("all_gather", "plan-demanded"),
    ]
    assert made.verify((ids,)).ok
    if dynamic:
        assert made.verify((torch.full((2, 7), rows - 1),)).ok
    assert max(made.parameter_bytes()[1]) == 4 * 2 * math.ceil(rows / 4) * WIDTH
