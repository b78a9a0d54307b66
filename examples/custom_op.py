"""An op of your own: discover its rule, register it, check it, and convert a model that calls it.

python examples/custom_op.py
"""

from __future__ import annotations

import torch
from torch import nn

import tpcompiler

HEADS, HEAD = 8, 16


@torch.library.custom_op("example::head_norm", mutates_args=())
def head_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Normalise every head: x is [batch, tokens, heads, head], weight [head]."""
    return x / x.square().mean(-1, keepdim=True).add(1e-6).sqrt() * weight


@head_norm.register_fake
def _(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(64, HEADS * HEAD), nn.Linear(HEADS * HEAD, 64)
        self.weight = nn.Parameter(torch.randn(HEAD))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.q(x).unflatten(-1, (HEADS, HEAD))
        return self.o(head_norm(heads, self.weight).flatten(-2))


def main() -> list[str]:
    torch.manual_seed(0)
    samples = [
        (torch.randn(b, s, h, d).double(), torch.randn(d).double()) for b, s, h, d in [(2, 4, 6, 8), (3, 5, 9, 10)]
    ]
    print(tpcompiler.discover_rule(head_norm, samples))
    tpcompiler.register_rule(head_norm, "b s h d!, d! -> b s h d!", shards="any", linear=[[1]])
    print(tpcompiler.check_rule(head_norm, samples))
    x = torch.randn(2, 4, 64)
    program = tpcompiler.parallelize(torch.export.export(Block(), (x,)), 2, {"q": "colwise", "o": "rowwise"})
    print(program.report())
    assert program.verify((x,)).ok
    return [collective.kind for collective in program.collectives()]


if __name__ == "__main__":
    main()
