"""Small artifacts for the tests of the views."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import tpcompiler

LAYERS = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}


def randomised(module: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module.eval()


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Tower(nn.Module):
    """Three layers, in a list or one that is called three times; every state is an output."""

    def __init__(self, shared: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.layers = nn.ModuleList(Mlp() for _ in range(1 if shared else 3))
        self.head = nn.Linear(8, 10, bias=False)

    def forward(self, ids: torch.Tensor) -> dict[str, Any]:
        x = self.embed(ids)
        states = []
        for at in range(3):
            x = self.layers[at % len(self.layers)](x)
            states.append(x)
        return {"logits": self.head(x), "states": states}


class Mixed(nn.Module):
    """A buffer that is written, layout ops, ops that need a dim whole, and a run of small ops."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.out = nn.Linear(8, 16)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.seen.add_(x.sum(0))
        scale = (x.abs() + 1).sqrt().mean(-1, keepdim=True).to(torch.float64).to(torch.float32)
        ranked = self.up(x * scale).T.flatten().sort().values.view(4, 4, 4).transpose(1, 2).amax(2)
        return ranked, self.out(x)


class CachedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor, position: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        cache.index_copy_(1, position, self.up(x))
        return x + self.down(torch.relu(cache).sum(1, keepdim=True))


class Cached(nn.Module):
    """Layers that write caches which lie outside of them, as Hugging Face's static cache does, and a tied head."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.layers = nn.ModuleList(CachedLayer() for _ in range(layers))
        for at in range(layers):
            self.register_buffer(f"cache_{at}", torch.zeros(2, 4, 16))
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for at, layer in enumerate(self.layers):
            x = layer(x, position, getattr(self, f"cache_{at}"))
        return self.head(x)  # type: ignore[no-any-return]


class Unknown(nn.Module):
    """What nobody knows the FLOPs of: a product that torch does not count, twice, and a branch. And two results."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.first = nn.Bilinear(8, 8, 8, bias=False)
        self.second = nn.Bilinear(8, 8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.second(x, self.first(x, x))
        return self.up(x), torch.cond(y.sum() > 0, torch.neg, torch.exp, (y,)), *x.topk(2)


def ids() -> torch.Tensor:
    return torch.zeros(2, 6, dtype=torch.int64)


def one_step() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(2, 1, dtype=torch.int64), torch.tensor([1])


def saved(directory: Path, module: nn.Module, example: Any, plan: dict[str, object], **options: Any) -> Path:
    exported = torch.export.export(randomised(module), example if isinstance(example, tuple) else (example,))
    tpcompiler.parallelize(exported, 2, plan, **options).save(directory)
    return directory
