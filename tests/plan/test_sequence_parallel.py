"""Norms on shares of the sequence: a block gathers before its column-wise layers and scatters after its row-wise ones."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.export import Dim, export

import tpcompiler
from tests.zoo.case import randomise

X = torch.randn(2, 8, 32)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (4, 8)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        made: torch.Tensor = self.o(attended.transpose(1, 2).flatten(-2))
        return made


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.down(F.gelu(self.up(x)))
        return made


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2, self.attention, self.mlp = nn.LayerNorm(32), nn.RMSNorm(32), Attention(), Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm_1(x))
        made: torch.Tensor = x + self.mlp(self.norm_2(x))
        return made


GATHERED = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
BY_TORCH: dict[str, Any] = {
    "norm_*": SequenceParallel(),
    "attention": GATHERED,
    "attention.[qkv]": ColwiseParallel(),
    "attention.o": RowwiseParallel(output_layouts=Shard(1)),
    "mlp": GATHERED,
    "mlp.up": ColwiseParallel(),
    "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
}
BY_TORCH = {
    **{name: style for name, style in BY_TORCH.items() if "[" not in name},
    **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
}
# The boundary says that the sequence stays cut; the search does the rest.
BY_NAME = {
    "norm_*": "sequence_parallel",
    **{f"attention.{name}": "colwise" for name in "qkv"},
    "attention.o": "rowwise",
    "mlp.up": "colwise",
    "mlp.down": "rowwise",
}


@pytest.mark.sample(1)
@pytest.mark.sweep(5)
@pytest.mark.parametrize("plan", [BY_TORCH, BY_NAME], ids=["torch's", "by name"])
@pytest.mark.parametrize("mesh", [2, 4, {"dp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("dynamic", [False, True])
def test_two_gathers_and_two_scatters_a_block(plan: dict[str, Any], mesh: Any, dynamic: bool) -> None:
    net = nn.Sequential(Block(), Block())
    shapes = ({0: Dim.AUTO, 1: Dim.AUTO},) if dynamic else None
    exported = export(randomise(net), (X,), dynamic_shapes=shapes)
    plan = {f"*.{name}": style for name, style in plan.items()}
    program = tpcompiler.parallelize(exported, mesh, plan, inputs=[{"tp": "S(1)"}], outputs=[{"tp": "S(1)"}])
    assert program.verify((torch.randn(2, 12, 32),) if dynamic else (X,)).ok
    assert Counter(c.kind for c in program.collectives()) == {"all_gather": 4, "reduce_scatter": 4}
    assert not any(c.why == "fallback" for c in program.collectives())
