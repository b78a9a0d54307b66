"""A small transformer with random weights of a size that makes every mistake visible, and programs to damage."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.export import ExportedProgram

from tpcompiler.ir import edit

aten = torch.ops.aten


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        q, k, v = (f(h).view(*h.shape[:2], 4, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self, width: int = 16, rows: int = 24) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(2))
        self.head = nn.Linear(width, rows)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.add_(1)
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x), x.mean(-1)


PLAN = {
    "embed": "embedding_rowwise",
    "layers.*.q": "colwise",
    "layers.*.k": "colwise",
    "layers.*.v": "colwise",
    "layers.*.o": "rowwise",
    "layers.*.up": "colwise",
    "layers.*.down": "rowwise",
    "head": "colwise_gather_output",
}


def randomised(module: nn.Module) -> nn.Module:
    """Weights of about 1 / sqrt(fan in), norms of about 1, biases that are not zero."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in module.named_parameters():
        value = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim > 1 and "embed" not in name:
            value = value / parameter.shape[-1] ** 0.5
        parameter.data = 1 + value / 10 if "norm" in name and name.endswith("weight") else value
    return module


def collectives(program: ExportedProgram) -> list[str]:
    return [node.name for node in program.graph.nodes if edit.is_collective(node)]


def damaged(program: ExportedProgram, name: str, change: Any) -> ExportedProgram:
    """A copy in which `change(graph, node)` gives what stands for the node of this name."""
    made = copy.deepcopy(program)
    node = next(node for node in made.graph.nodes if node.name == name)
    with made.graph.inserting_after(node):
        instead = change(made.graph, node)
    node.replace_all_uses_with(instead, delete_user_cb=lambda user: user is not instead)
    return made


def skipped(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Instead of a collective, what a rank that talks to nobody has: the right shape, the wrong numbers."""
    operand = node.args[0]
    if "all_gather" in str(node.target):
        return graph.call_function(aten.cat.default, ([operand] * node.args[1],))  # type: ignore[list-item]
    if "reduce_scatter" in str(node.target):
        parts = graph.call_function(aten.chunk.default, (operand, node.args[2]))
        return graph.call_function(lambda parts: parts[0].clone(), (parts,))
    return graph.call_function(aten.clone.default, (operand,))
