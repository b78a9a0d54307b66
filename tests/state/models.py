"""Models that write their buffers: a Llama by hand with a KV cache, and a net with batch norm."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

HEADS, KV_HEADS, WIDTH, HIDDEN, VOCABULARY, LENGTH = 8, 4, 64, 96, 120, 16
HEAD = WIDTH // HEADS
WRITES = ("index_copy", "index_put", "slice", "roll", "scatter")

PLAN = {
    "embed": "embedding_rowwise",
    "layers.*.q": "colwise",
    "layers.*.k": "colwise",
    "layers.*.v": "colwise",
    "layers.*.o": "rowwise",
    "layers.*.gate": "colwise",
    "layers.*.up": "colwise",
    "layers.*.down": "rowwise",
    "head": "colwise_gather_output",
}


def rotated(x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of [batch, heads, tokens, HEAD] at these positions."""
    frequency = 100.0 ** (-torch.arange(0, HEAD, 2) / HEAD)
    angle = position[:, None] * frequency
    cos, sin = (torch.cat([part, part], -1) for part in (angle.cos(), angle.sin()))
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


class Layer(nn.Module):
    """One decoder layer. `write` says how new keys and values get into the cache [batch, kv heads, LENGTH, HEAD]."""

    def __init__(self, batch: int, write: str) -> None:
        super().__init__()
        self.write = write
        self.before, self.after = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q = nn.Linear(WIDTH, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, KV_HEADS * HEAD), nn.Linear(WIDTH, KV_HEADS * HEAD)
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.register_buffer("keys", torch.zeros(batch, KV_HEADS, LENGTH, HEAD))
        self.register_buffer("values", torch.zeros(batch, KV_HEADS, LENGTH, HEAD))

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape
        normed = self.before(x)
        q, k, v = (m(normed).view(batch, tokens, -1, HEAD).transpose(1, 2) for m in (self.q, self.k, self.v))
        self.put(self.keys, rotated(k, position), position)
        self.put(self.values, v, position)
        where = torch.arange(LENGTH)
        held = where if self.write != "roll" else where - (LENGTH - 1) + position[-1]  # the newest is last
        mask = (held[None, :] <= position[:, None]) & (held >= 0)
        read = F.scaled_dot_product_attention(
            rotated(q, position), self.keys, self.values, attn_mask=mask, enable_gqa=True
        )
        x = x + self.o(read.transpose(1, 2).reshape(batch, tokens, WIDTH))
        normed = self.after(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))

    def put(self, cache: torch.Tensor, new: torch.Tensor, position: torch.Tensor) -> None:
        tokens = new.shape[2]
        if self.write == "index_copy":
            cache.index_copy_(2, position, new)
        elif self.write == "index_put":
            cache[:, :, position] = new
        elif self.write == "slice":
            cache[:, :, :tokens] = new
        elif self.write == "roll":
            cache.copy_(torch.cat([cache[:, :, tokens:], new], 2))
        else:
            cache.scatter_(2, position.view(1, 1, -1, 1).expand(new.shape), new)


class Llama(nn.Module):
    """`forward(tokens, position)` gives the logits of the tokens at these positions."""

    def __init__(self, batch: int = 2, write: str = "index_copy", layers: int = 1) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.layers = nn.ModuleList(Layer(batch, write) for _ in range(layers))
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, tokens: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, position)
        return self.head(self.norm(x))


def call(batch: int, first: int, count: int) -> tuple[tuple[torch.Tensor, torch.Tensor], dict[str, torch.Tensor]]:
    """(args, kwargs) of `count` tokens from position `first`."""
    generator = torch.Generator().manual_seed(100 * first + count)
    tokens = torch.randint(0, VOCABULARY, (batch, count), generator=generator)
    return (tokens, torch.arange(first, first + count)), {}


class Normed(nn.Module):
    """Channels cut through a convolution, batch norm in training mode and a second convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.norm(self.first(x))))
