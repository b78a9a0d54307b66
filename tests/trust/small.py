"""Small models that together have a place for every kind of damage."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Rows(nn.Module):
    """Ids that are looked up, a packed layer, a sum over ranks with a bias, and two buffers that are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.packed = nn.Linear(8, 30)
        self.down = nn.Linear(10, 8)
        self.back = nn.Linear(8, 8)
        self.register_buffer("kept", torch.zeros(4, 8))
        self.register_buffer("other", torch.ones(4, 8))

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.table(ids)
        gate, up, scale = self.packed(x).split([10, 10, 10], -1)
        y = self.down(torch.relu(gate) * up + torch.sigmoid(scale))
        before = self.kept + self.other
        self.kept.add_(y.sum(1))
        self.other.mul_(0.5).add_(x.sum(1))
        return {"before": before, "y": self.back(y) - x}


class Attend(nn.Module):
    """A norm, causal attention with packed parts of several sizes, and a gated layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.packed = nn.Linear(16, 32)
        self.out = nn.Linear(16, 16)
        self.gate, self.up, self.down = nn.Linear(16, 12), nn.Linear(16, 12), nn.Linear(12, 16)

    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> dict[str, torch.Tensor]:
        q, k, v = self.packed(self.norm(x)).split([16, 8, 8], -1)
        q, k, v = (part.unflatten(-1, (heads, 4)).transpose(1, 2) for part, heads in ((q, 4), (k, 2), (v, 2)))
        q = torch.cat((-q[..., 2:], q[..., :2]), -1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.6, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        gate = self.gate(x + shift)
        return {"all": x + self.down(torch.relu(gate) * self.up(x) + gate), "mixed": x}


class Images(nn.Module):
    """Convolutions, one of them by channel, and a norm in groups."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(4, 8, 3), nn.Conv2d(8, 4, 1)
        self.by_channel, self.norm = nn.Conv2d(8, 8, 3, groups=8), nn.GroupNorm(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.by_channel(self.norm(self.first(x)))))


class Uneven(nn.Module):
    """Columns that ranks do not divide, gathered; and rows that they do not divide, exchanged for columns."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(6, 7), nn.Linear(7, 8), nn.Linear(6, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(torch.relu(self.one(x)) - self.three(x))


class Choose(nn.Module):
    """Two layers, and a branch that depends on what they make."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(torch.relu(self.up(x)))
        result: torch.Tensor = torch.cond(y.sum() > 0, lambda y: y.sin() + 1, self.other, (y,))
        return result

    def other(self, y: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.cond(y.mean() > -1, lambda y: y.cos() * 2, lambda y: -y, (y,))
        return result


class Decode(nn.Module):
    """A step of decoding with a cache of 64 steps, 2 heads of keys and values for 4 of queries."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.randn(2, 2, 64, 16))
        self.register_buffer("values", torch.randn(2, 2, 64, 16))

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        self.keys.index_copy_(2, at, k)
        self.values.index_copy_(2, at, v)
        seen = torch.arange(64) <= at[-1]
        return F.scaled_dot_product_attention(q, self.keys, self.values, seen.view(1, 1, 1, 64), enable_gqa=True)


class Turns(nn.Module):
    """Causal attention that the plan wants in turns."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = Causal()

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.attend(q, k, v)
        return made


class Causal(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Batches(nn.Module):
    """Statistics of all samples, and running sums over them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(x)).cumsum(0)
