"""Recommenders: large tables, small networks."""

from __future__ import annotations

import torch
from torch import nn
from torch.export import Dim

from tests.zoo.case import BATCH, Case, randomise

DENSE, FEATURES, ROWS = 10, 16, (600, 400, 60, 36)


class Recommender(nn.Module):
    """As DLRM: a vector for the numbers, one for each bag of ids; the products of all pairs; a network on top."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(DENSE, 24), nn.ReLU(), nn.Linear(24, FEATURES), nn.ReLU())
        self.large = nn.ModuleList(nn.Embedding(rows, FEATURES) for rows in ROWS[:2])
        self.small = nn.ModuleList(nn.EmbeddingBag(rows, FEATURES, mode="sum") for rows in ROWS[2:])
        self.top = nn.Sequential(nn.Linear(FEATURES + 10, 32), nn.ReLU(), nn.Linear(32, 1))
        self.pairs: torch.Tensor
        self.register_buffer("pairs", torch.tril_indices(5, 5, -1), persistent=False)

    def forward(self, numbers: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """numbers [b, 10], ids [4, b, k] of the tables -> scores [b]."""
        x = self.bottom(numbers)
        bags = [table(i).sum(1) for table, i in zip(self.large, ids[:2], strict=True)]
        bags += [table(i) for table, i in zip(self.small, ids[2:], strict=True)]
        vectors = torch.stack([x, *bags], 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        chosen = products[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([x, chosen], 1)).squeeze(-1)  # type: ignore[no-any-return]


def _clicks(batch: int, size: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(batch * 1000 + size)
    ids = [torch.randint(0, rows, (batch, size), generator=generator) for rows in ROWS]
    return {"numbers": torch.randn(batch, DENSE, generator=generator), "ids": torch.stack(ids)}


DLRM = Case(
    name="dlrm",
    build=lambda: randomise(Recommender()),
    inputs=_clicks,
    tested="tables, bags, integers",
    dims={"numbers": {0: BATCH}, "ids": {1: BATCH, 2: Dim("bag")}},
    example=(4, 3),
    others=((3, 2), (2, 1), (1, 5)),
    plan={
        "large.*": "embedding_rowwise",
        "small.*": "colwise",
        "bottom.0": "colwise",
        "bottom.2": "rowwise",
        "top.0": "colwise",
        "top.2": "rowwise",
    },
    layers=(),
    # One sum for each of two networks. The small tables cut the features, over which the products of pairs are summed;
    # so the sums of the two large tables' bags are wanted cut too, and scattered.
    outside={"all_reduce": 3, "reduce_scatter": 2},
    cut=0.99,  # all but the biases of row-wise layers, 16 and 1
)

CASES = [DLRM]
