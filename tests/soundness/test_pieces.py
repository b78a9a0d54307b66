"""Pieces of the model that the compiler writes in another way are compared where they are, in every layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.export import Dim, export

import tpcompiler
from tpcompiler.judge.sound import pieces
from tpcompiler.judge.sound.check import CheckReport, check_programs
from tpcompiler.judge.sound.written import read_ranks
from tpcompiler.passes.canonicalize import canonicalize

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
HEADS, SHARED, WIDTH = 8, 2, 64
PLAN = {f"layers.*.{name}": "colwise" for name in "qkv"} | {"layers.*.out": "rowwise"}
PLAN |= {"layers.*.up": "colwise", "layers.*.down": "rowwise"}


def repeat_heads(x: torch.Tensor) -> torch.Tensor:
    batch, heads, length, width = x.shape
    repeated = x[:, :, None].expand(batch, heads, HEADS // SHARED, length, width)
    return repeated.reshape(batch, HEADS, length, width)


class Layer(nn.Module):
    """Heads of keys and values are repeated for the heads of queries; the compiler lets attention share them."""

    def __init__(self) -> None:
        super().__init__()
        shared = WIDTH // HEADS * SHARED
        self.q, self.k, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, shared), nn.Linear(WIDTH, shared)
        self.out, self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (linear(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, repeat_heads(k), repeat_heads(v), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.up(x)))


class Layers(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def checked(count: int, change: Callable[[fx.Graph], Any] = lambda graph: None, dtype: Any = None) -> CheckReport:
    """Check the ranks of a model of some layers against the model with a change."""
    sizes = ({0: Dim("batch"), 1: Dim("length")},)
    program = export(Layers(count).to(dtype), (torch.randn(3, 5, WIDTH, dtype=dtype),), dynamic_shapes=sizes)
    made = tpcompiler.parallelize(program, 2, PLAN)
    ranks = read_ranks(made.only)
    assert all(call(ranks[0].program.graph, ATTENTION, layer).kwargs["enable_gqa"] for layer in range(count))
    model = canonicalize(made.only.original())
    change(model.graph)
    return check_programs(ranks, made.manifest(), model=model)


def call(graph: fx.Graph, target: Any, layer: int) -> fx.Node:
    return list(graph.find_nodes(op="call_function", target=target))[layer]


def other_scale(graph: fx.Graph) -> None:
    node = call(graph, ATTENTION, 1)
    node.kwargs = {**node.kwargs, "scale": 0.5}


def keys_for_values(graph: fx.Graph) -> None:
    node = call(graph, ATTENTION, 1)
    q, k, v, *others = node.args
    node.args = (q, v, k, *others)


def other_activation(graph: fx.Graph) -> None:
    call(graph, torch.ops.aten.silu.default, 1).target = torch.ops.aten.gelu.default


CHANGES = [other_scale, keys_for_values, other_activation]


def test_all_pieces_are_compared() -> None:
    report = checked(2)
    assert (report.findings, report.counts.get("pieces that cannot be compared here")) == ([], None)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_change_beside_a_piece_is_found_where_it_is(change: Callable[[fx.Graph], None], dtype: torch.dtype) -> None:
    """The repeated heads of other layers, and of this one, are no finding; half precision hides no activation."""
    (finding,) = checked(3, change, dtype).findings
    where = "silu_1" if change is other_activation else "scaled_dot_product_attention_1"
    assert finding.startswith(f"rank_0.pt2: '{where}'")


def test_a_piece_is_of_its_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that the ranks read off keys, and the model off its input, do not lead through all layers before."""
    lengths: list[int] = []
    walk = pieces.Pieces._slice

    def counted(self: pieces.Pieces, *args: Any) -> pieces.Piece:
        nodes = walk(self, *args)
        lengths.append(len(nodes))
        return nodes

    monkeypatch.setattr(pieces.Pieces, "_slice", counted)
    longest = []
    for count in (2, 5):
        lengths.clear()
        assert checked(count).ok
        longest.append(max(lengths))
    assert longest[0] == longest[1] <= 12


def test_a_finding_stands_where_the_outputs_are_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of one name may differ in a program that was renamed, but only if the outputs are shown to be equal."""
    monkeypatch.setattr(pieces, "MOST", 2**16)
    (finding,) = checked(3, other_activation).findings
    assert finding.startswith("rank_0.pt2: 'silu_1'")
    monkeypatch.setattr(pieces, "MOST", 1)
    assert checked(3).counts["pieces that cannot be compared here"] == 3
