"""A small decoder in half precision with its norms in float32, as real ones are."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim, ExportedProgram

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


class Norm(nn.Module):
    """Root mean square in float32, back in the type of the input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Layer(nn.Module):
    def __init__(self, width: int = 32, head: int = 4) -> None:
        super().__init__()
        self.head = head
        self.norm_1, self.norm_2 = Norm(width), Norm(width)
        self.q, self.o = nn.Linear(width, width), nn.Linear(width, width)
        self.k, self.v = nn.Linear(width, width // 2), nn.Linear(width, width // 2)
        self.gate, self.up, self.down = nn.Linear(width, 48), nn.Linear(width, 48), nn.Linear(48, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm_1(x)
        q, k, v = (f(h).view(*h.shape[:2], -1, self.head).transpose(1, 2) for f in (self.q, self.k, self.v))
        made = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(made.transpose(1, 2).reshape(*h.shape[:2], -1))
        h = self.norm_2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    def __init__(self, layers: int = 1) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 32)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm = Norm(32)
        self.head = nn.Linear(32, 40, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def randomised(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Weights about 1/sqrt(fan_in), norm weights about 1, biases about 0.3."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, value in model.named_parameters():
            noise = torch.randn(value.shape, generator=generator)
            value.copy_(
                1 + 0.2 * noise if "norm" in name else noise / value.shape[-1] ** 0.5 if value.ndim > 1 else 0.3 * noise
            )
    return model.to(dtype).eval()


def token_ids(batch: int, sequence: int) -> torch.Tensor:
    return torch.randint(0, 40, (batch, sequence), generator=torch.Generator().manual_seed(batch * 100 + sequence))


def export_decoder(dtype: torch.dtype, dynamic: bool = False) -> ExportedProgram:
    shapes: Any = {"ids": {0: Dim("batch"), 1: Dim("sequence", max=64)}} if dynamic else None
    return torch.export.export(randomised(Decoder(), dtype), (token_ids(2, 12),), dynamic_shapes=shapes)
