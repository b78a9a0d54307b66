"""Attention over a sequence that is cut: queries by steps, or the cache that keys and values are kept in."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim, export

import tpcompiler
from tests.trust.small import Decode
from tests.zoo.case import hugging_face, randomise

X = torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(1))
WHOLE = dict.fromkeys(("q", "k", "v", "o"), "replicate")
CUT = {"q": "colwise", "k": "colwise", "v": "colwise", "o": "rowwise"}


class Attention(nn.Module):
    """Causal, of 4 heads of queries."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(64, 64), nn.Linear(64, 64)
        self.k, self.v = nn.Linear(64, 16 * heads), nn.Linear(64, 16 * heads)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, 16)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        made = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.o(made.transpose(1, 2).flatten(2))


@pytest.mark.sample(1)
@pytest.mark.sweep(3)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_queries_by_steps_gather_keys_and_values(dynamic: bool, world: int, tmp_path: Path) -> None:
    """Of one head of keys and values, and of fewer samples than ranks: none of them for every rank."""
    sizes = ({0: Dim("batch"), 1: Dim("steps")},) if dynamic else None
    x = X if dynamic else X[:1]
    exported = export(randomise(Attention(1)), (x,), dynamic_shapes=sizes)
    program = tpcompiler.parallelize(exported, world, WHOLE, inputs=["S(1)"], outputs=["S(1)"])
    sent = [("all_gather", x.shape[0] * 32 * 16 * 4)] * 2
    assert [(c.kind, c.payload_bytes) for c in program.collectives()] == sent
    assert program.verify((x,)).ok
    assert not dynamic or program.verify((torch.randn(3, 20, 64),)).ok
    program.save(tmp_path / "out")  # and checks the files


@pytest.mark.slow
def test_beside_a_cut_of_the_heads() -> None:
    exported = export(randomise(Attention(2)), (X,))
    boundary = [{"cp": "S(1)"}]
    program = tpcompiler.parallelize(exported, {"cp": 2, "tp": 2}, CUT, inputs=boundary, outputs=boundary)
    assert [(c.kind, c.axis) for c in program.collectives()] == [("all_gather", "cp")] * 2 + [("all_reduce", "tp")]
    assert program.verify((X,)).ok


@pytest.mark.slow
def test_a_whole_model_by_the_boundary() -> None:
    """Every layer works on its steps; in each block the keys and the values are gathered, as many as a rank's heads."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    model = randomise(transformers.LlamaForCausalLM(config))
    ids = {"input_ids": torch.arange(64).reshape(1, 64) % 96}
    exported = export(model, (), ids)
    boundary: Any = {"cp": "S(1)"}
    mesh, plan = {"cp": 2, "tp": 2}, hugging_face(model)
    program = tpcompiler.parallelize(exported, mesh, plan, inputs=[boundary], outputs=[boundary])
    assert program.verify((), ids).ok
    inside = Counter((c.kind, c.axis, c.payload_bytes) for c in program.collectives() if ".layers." in c.module)
    half = 32 * 64 * 4  # of the tokens, in bytes
    assert inside == {("all_reduce", "tp", half): 4, ("all_gather", "cp", 64 * 16 * 4): 4}


def calls(steps: int, *first: int) -> list[tuple[torch.Tensor, ...]]:
    return [
        (torch.randn(2, 4, steps, 16), *torch.randn(2, 2, 2, steps, 16), torch.arange(at, at + steps)) for at in first
    ]


@pytest.mark.sample(1)
@pytest.mark.sweep(5)
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize(
    ("mesh", "placement"),
    [(2, "S(2)"), (4, "S(2)"), ({"tp": 2, "cp": 2}, {"tp": "S(1)", "cp": "S(2)"})],
    ids=["2", "4", "heads and steps"],
)
def test_a_cache_by_steps(mesh: Any, placement: Any, steps: int, tmp_path: Path) -> None:
    """A maximum, and a sum beside the weighted sum: for each query and head 18 numbers, and not the cache."""
    first, *then = calls(steps, 5, 14, 31, 60)
    exported = export(Decode(), first)
    program = tpcompiler.parallelize(exported, mesh, {"keys": placement, "values": placement})
    heads = 2 if isinstance(mesh, dict) else 4
    numbers = 2 * heads * steps
    sent = [(c.kind, c.payload_bytes) for c in program.collectives() if c.axis != "tp" or heads == 4]
    assert sent == [("all_reduce", 4 * numbers), ("all_reduce", 4 * 17 * numbers)]
    assert program.verify(first, then=then).ok  # ranks that see no key yet, steps that lie on two ranks
    program.save(tmp_path / "out")  # and checks the files


class Batch(nn.Module):
    """A step of decoding for sequences each of which is at a position of its own; slots from behind are negative."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(3, 64, 2, 16))
        self.register_buffer("values", torch.zeros(3, 64, 2, 16))

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(3)
        self.keys[rows, at] = k
        self.values[rows, at - 64] = v
        seen = (torch.arange(64) <= at[:, None])[:, None, None, :]
        keys, values = self.keys.transpose(1, 2), self.values.transpose(1, 2)
        return F.scaled_dot_product_attention(q, keys, values, seen, enable_gqa=True)


@pytest.mark.sample(1)
@pytest.mark.parametrize("world", [2, 4])
def test_sequences_at_positions_of_their_own(world: int, tmp_path: Path) -> None:
    """Each rank writes what lies in its steps; the cache is not gathered."""
    first, *then = (
        (torch.randn(3, 4, 1, 16), *torch.randn(2, 3, 2, 16), torch.tensor(at))
        for at in ([0, 5, 31], [1, 6, 32], [33, 63, 15], [34, 16, 17])
    )
    exported = export(Batch(), first)
    program = tpcompiler.parallelize(exported, world, {"keys": "S(1)", "values": "S(1)"})
    assert [(c.kind, c.payload_bytes) for c in program.collectives()] == [("all_reduce", 48), ("all_reduce", 48 * 17)]
    assert program.verify(first, then=then).ok
    program.save(tmp_path / "out")  # and checks the files
