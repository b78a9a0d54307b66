"""Small modules that several pass tests share."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Mlp(nn.Module):
    def __init__(self, width: int = 4, inner: int = 6) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.relu(self.up(x)))


class Attention(nn.Module):
    """Grouped queries over [b, s, width], heads of 2."""

    def __init__(self, width: int = 8, heads: int = 4, groups: int = 2) -> None:
        super().__init__()
        self.groups = groups
        self.q = nn.Linear(width, heads * 2)
        self.k = nn.Linear(width, heads // groups * 2, bias=False)
        self.v = nn.Linear(width, heads // groups * 2)
        self.o = nn.Linear(heads * 2, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).view(*x.shape[:2], -1, 2).transpose(1, 2) for f in (self.q, self.k, self.v))
        made = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.groups > 1)
        return self.o(made.transpose(1, 2).reshape(*x.shape[:2], -1))


class Tied(nn.Module):
    """Logits of a small vocabulary with the embedding's own table."""

    def __init__(self, rows: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, 4)
        self.head = nn.Linear(4, rows, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids))


MEGATRON = {"**.up": "colwise", "**.down": "rowwise"}
HEADS = {"**.q": "colwise", "**.k": "colwise", "**.v": "colwise", "**.o": "rowwise"}
