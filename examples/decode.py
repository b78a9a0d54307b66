"""Decode with a KV cache: every rank keeps its own heads of it, from call to call, for no collective.

python examples/decode.py
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import tpcompiler

HEADS, HEAD, LENGTH = 8, 16, 32


class Attention(nn.Module):
    """Causal attention over a cache of LENGTH positions; `position` says where the new tokens stand."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(HEADS * HEAD, HEADS * HEAD) for _ in range(4))
        self.register_buffer("keys", torch.zeros(1, HEADS, LENGTH, HEAD))
        self.register_buffer("values", torch.zeros(1, HEADS, LENGTH, HEAD))

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        q, k, v = (m(x).view(1, -1, HEADS, HEAD).transpose(1, 2) for m in (self.q, self.k, self.v))
        self.keys.index_copy_(2, position, k)
        self.values.index_copy_(2, position, v)
        mask = torch.arange(LENGTH) <= position[:, None]
        read = scaled_dot_product_attention(q, self.keys, self.values, attn_mask=mask)
        return self.o(read.transpose(1, 2).flatten(2))


def call(first: int, count: int) -> tuple[tuple[torch.Tensor, torch.Tensor], dict[str, torch.Tensor]]:
    """(args, kwargs) for `count` tokens from position `first`."""
    return (torch.randn(1, count, HEADS * HEAD), torch.arange(first, first + count)), {}


def main() -> float:
    torch.manual_seed(0)
    tokens = torch.export.Dim("tokens", min=1, max=LENGTH)
    dynamic = {"x": {1: tokens}, "position": {0: tokens}}
    exported = torch.export.export(Attention(), *call(0, 4), dynamic_shapes=dynamic)
    program = tpcompiler.parallelize(exported, 2, {"q": "colwise", "k": "colwise", "v": "colwise", "o": "rowwise"})
    print(program.report())
    steps = [call(8 + step, 1) for step in range(10)]
    report = program.verify(*call(0, 8), then=steps)  # a prompt of 8 tokens, then one by one
    print(f"\n{1 + len(steps)} calls, {'equal' if report.ok else 'NOT EQUAL'}: max rel err {report.max_rel_err:.2g}")
    assert report.ok, str(report)
    return report.max_rel_err


if __name__ == "__main__":
    main()
