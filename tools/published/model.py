"""A decoder of given dimensions, without weights: what a published step ran."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.nn import functional as F

from tpcompiler import weightless
from tpcompiler.api.request import read_plan
from tpcompiler.frontend.exporting import export_prefill_and_decode
from tpcompiler.plan.plan import Plan


@dataclass(frozen=True)
class Dims:
    """A decoder.

    Attributes:
        gated: SwiGLU, RMSNorm and rotary embeddings; otherwise GELU, LayerNorm and biases.
        experts: how many, two of which a token takes; 0 without.
        head_dim: 0 for hidden / heads.
        parallel: attention and MLP both read what the layer is given.
        itemsize: bytes of a weight: 2, or 1.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int
    gated: bool = True
    experts: int = 0
    head_dim: int = 0
    parallel: bool = False
    itemsize: int = 2

    @property
    def width(self) -> int:
        return self.head_dim or self.hidden // self.heads


class Dense(nn.Module):
    """A linear layer whose weight has one byte or two; of one byte, it is widened where it is used."""

    def __init__(self, inside: int, outside: int, dims: Dims) -> None:
        super().__init__()
        dtype = torch.int8 if dims.itemsize == 1 else torch.bfloat16
        self.weight = nn.Parameter(torch.empty(outside, inside, dtype=dtype), requires_grad=False)
        self.bias = None if dims.gated else nn.Parameter(torch.empty(outside, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.to(torch.bfloat16), self.bias)


class Attention(nn.Module):
    def __init__(self, dims: Dims, batch: int, length: int) -> None:
        super().__init__()
        self.dims = dims
        self.k_cache: torch.Tensor
        self.v_cache: torch.Tensor
        kv, width = dims.kv_heads, dims.width
        self.qkv = Dense(dims.hidden, (dims.heads + 2 * kv) * width, dims)
        self.o = Dense(dims.heads * width, dims.hidden, dims)
        for name in ("k_cache", "v_cache"):
            self.register_buffer(name, torch.empty(batch, kv, length, width, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor, at: torch.Tensor, mask: torch.Tensor | None, turn: torch.Tensor) -> torch.Tensor:
        dims, (batch, steps, _) = self.dims, x.shape
        sizes = [n * dims.width for n in (dims.heads, dims.kv_heads, dims.kv_heads)]
        q, k, v = (part.view(batch, steps, -1, dims.width).transpose(1, 2) for part in self.qkv(x).split(sizes, dim=-1))
        if dims.gated:
            q, k = q * turn + q.flip(-1) * turn, k * turn + k.flip(-1) * turn
        self.k_cache.index_copy_(2, at, k)
        self.v_cache.index_copy_(2, at, v)
        keys, values = (self.k_cache, self.v_cache) if mask is not None else (k, v)
        gqa = dims.heads != dims.kv_heads
        made = F.scaled_dot_product_attention(q, keys, values, mask, is_causal=mask is None, enable_gqa=gqa)
        return self.o(made.transpose(1, 2).reshape(batch, steps, -1))


class Mlp(nn.Module):
    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.dims = dims
        self.up = Dense(dims.hidden, dims.intermediate * (2 if dims.gated else 1), dims)
        self.down = Dense(dims.intermediate, dims.hidden, dims)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.dims.gated:
            return self.down(F.gelu(self.up(x)))
        gate, up = self.up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Experts(nn.Module):
    """Two of several experts for each token; the rows of each expert are next to each other."""

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.gate = nn.Linear(dims.hidden, dims.experts, bias=False, dtype=torch.bfloat16)
        self.up = nn.Parameter(torch.empty(dims.experts, dims.hidden, 2 * dims.intermediate, dtype=torch.bfloat16))
        self.down = nn.Parameter(torch.empty(dims.experts, dims.intermediate, dims.hidden, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        weights, chosen = self.gate(rows).float().softmax(-1).topk(2)
        order = chosen.flatten().argsort()
        ends = F.one_hot(chosen.flatten(), self.gate.out_features).sum(0).cumsum(0).to(torch.int32)
        gate, up = torch._grouped_mm(rows[order // 2], self.up, ends).chunk(2, dim=-1)
        made = torch._grouped_mm(F.silu(gate) * up, self.down, ends) * weights.flatten()[order, None].to(x.dtype)
        return torch.zeros_like(rows).index_add(0, order // 2, made).view_as(x)


class Layer(nn.Module):
    def __init__(self, dims: Dims, batch: int, length: int) -> None:
        super().__init__()
        norm = nn.RMSNorm if dims.gated else nn.LayerNorm
        self.norm1, self.norm2 = (norm(dims.hidden, dtype=torch.bfloat16) for _ in range(2))
        self.attention = Attention(dims, batch, length)
        self.mlp = Experts(dims) if dims.experts else Mlp(dims)
        self.parallel = dims.parallel

    def forward(self, x: torch.Tensor, at: torch.Tensor, mask: torch.Tensor | None, turn: torch.Tensor) -> torch.Tensor:
        if self.parallel:
            given = self.norm1(x)
            return x + (self.attention(given, at, mask, turn) + self.mlp(given))
        x = x + self.attention(self.norm1(x), at, mask, turn)
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    """Tokens to the logits of the last one; with a cache of `length` steps, which decode reads."""

    def __init__(self, dims: Dims, batch: int, length: int, *, is_decode: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(dims.vocab, dims.hidden, dtype=torch.bfloat16)
        self.layers = nn.ModuleList(Layer(dims, batch, length) for _ in range(dims.layers))
        norm = nn.RMSNorm if dims.gated else nn.LayerNorm
        self.norm = norm(dims.hidden, dtype=torch.bfloat16)
        self.head = nn.Linear(dims.hidden, dims.vocab, bias=False, dtype=torch.bfloat16)
        self.turns: torch.Tensor
        self.register_buffer("turns", torch.empty(length, dims.width, dtype=torch.bfloat16))
        self.is_decode, self.length = is_decode, length

    def forward(self, tokens: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        x, turn = self.embed(tokens), self.turns[at]
        mask = torch.arange(self.length, device=at.device) <= at[:, None] if self.is_decode else None
        for layer in self.layers:
            x = layer(x, at, mask, turn)
        return self.head(self.norm(x[:, -1:]))


def export_decoder(dims: Dims, batch: int, prompt: int, *, is_decode: bool) -> ExportedProgram:
    """Export one step of a decoder: a token after `prompt` of them, or the prompt."""
    steps = 1 if is_decode else prompt
    with weightless():
        model = Decoder(dims, batch, prompt + steps, is_decode=is_decode).eval()
        example = torch.zeros(batch, steps, dtype=torch.int64), torch.arange(steps)
        with torch.no_grad():
            return torch.export.export(model, example)


def export_from_config(
    dims: Dims, batch: int, prompt: int, *, is_decode: bool, room: int = 0, dtype: str = "bfloat16"
) -> tuple[ExportedProgram, Plan]:
    """Export the step as `tpcompiler export DIR --prefill-decode` does, and read the plan of its config.json.

    Args:
        room: tokens that the cache can hold; 0: one more than the prompt.
    """
    from transformers import AutoConfig

    room = room or max(prompt, 2) + 1
    sizes = {
        "num_hidden_layers": dims.layers,
        "hidden_size": dims.hidden,
        "intermediate_size": dims.intermediate,
        "num_attention_heads": dims.heads,
        "num_key_value_heads": dims.kv_heads,
        "head_dim": dims.width,
        "vocab_size": dims.vocab,
        "max_position_embeddings": room,
        **({"num_local_experts": dims.experts, "num_experts_per_tok": 2} if dims.experts else {}),
    }
    kind = "Mixtral" if dims.experts else "Llama"
    config = AutoConfig.for_model(kind.lower(), **sizes, architectures=[f"{kind}ForCausalLM"], dtype=dtype)
    with tempfile.TemporaryDirectory() as directory:
        config.save_pretrained(directory)
        programs = export_prefill_and_decode(directory, batch=batch, length=prompt, max_length=room)
        return programs["decode" if is_decode else "prefill"].program, read_plan(Path(directory) / "config.json")


def export_bert(layers: int, batch: int, steps: int) -> ExportedProgram:
    """Export one call of an encoder of BERT-large's dimensions, without its pooler."""
    from transformers import BertConfig, BertModel

    config = BertConfig(
        num_hidden_layers=layers, hidden_size=1024, num_attention_heads=16, intermediate_size=4096, dtype=torch.bfloat16
    )
    with weightless():
        bert: Any = BertModel(config, add_pooling_layer=False)
        with torch.no_grad():
            return torch.export.export(bert.to(torch.bfloat16).eval(), (torch.zeros(batch, steps, dtype=torch.int64),))


def megatron_plan(dims: Dims, *, whole_head: bool) -> dict[str, str]:
    """The plan of Shoeybi et al., "Megatron-LM" (2019)."""
    packed = f"S(2, parts {dims.intermediate} {dims.intermediate})"  # gate and up, each by itself
    experts = {"layers.*.mlp.up": packed, "layers.*.mlp.down": "S(1)"}
    mlp = {"layers.*.mlp.up": "packed_colwise:2" if dims.gated else "colwise", "layers.*.mlp.down": "rowwise"}
    sizes = ",".join(str(n * dims.width) for n in (dims.heads, dims.kv_heads, dims.kv_heads))
    return {
        "layers.*.attention.qkv": f"packed_colwise:{sizes}",
        "layers.*.attention.o": "rowwise",
        **(experts if dims.experts else mlp),
        **({} if whole_head else {"head": "colwise_gather_output"}),
    }
