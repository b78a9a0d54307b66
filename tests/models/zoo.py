"""Small real models with every parameter set so that it matters, their inputs, plans and hand-derived collectives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import Dim, ExportedProgram


def randomise(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Weights about 1/sqrt(fan_in), norm weights about 1, biases about 0.3: a wrong shard or a doubled bias shows."""
    generator = torch.Generator().manual_seed(seed)
    norms = {f"{name}.weight" for name, module in model.named_modules() if "norm" in type(module).__name__.lower()}
    with torch.no_grad():
        for name, value in model.named_parameters():
            noise = torch.randn(value.shape, generator=generator)
            value.copy_(
                1 + 0.2 * noise if name in norms else noise / value.shape[-1] ** 0.5 if value.ndim > 1 else 0.3 * noise
            )
        for name, value in model.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                value.copy_(1 + 0.3 * torch.rand(value.shape, generator=generator))
    return model.eval()


@dataclass(frozen=True)
class Case:
    """A model with its plan and what is known of it by hand."""

    name: str
    build: Callable[[], torch.nn.Module]
    inputs: Callable[[int, int], dict[str, torch.Tensor]]  # (batch, sequence)
    dims: dict[str, Any]
    plan: dict[str, str]
    layers: int
    per_layer: int  # all_reduce, by hand
    outside: dict[str, int]  # collectives outside the layers, by hand

    def export(self, dynamic: bool) -> ExportedProgram:
        return torch.export.export(
            self.build(), (), self.inputs(2, 12), dynamic_shapes=self.dims if dynamic else None, strict=False
        )


def _llama() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=120,
        use_cache=False,
    )
    return randomise(LlamaForCausalLM(config))


class Encoder(torch.nn.Module):
    """The pretrained all-MiniLM-L6-v2 with its mean pooling, as the demo runs it."""

    def __init__(self) -> None:
        super().__init__()
        from examples.minilm import SentenceEncoder

        self.inner = SentenceEncoder()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.inner(input_ids, attention_mask)


def _ids(vocabulary: int) -> Callable[[int, int], dict[str, torch.Tensor]]:
    def make(batch: int, sequence: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(batch * 1000 + sequence)
        return {"input_ids": torch.randint(0, vocabulary, (batch, sequence), generator=generator)}

    return make


def _masked(batch: int, sequence: int) -> dict[str, torch.Tensor]:
    made = _ids(30522)(batch, sequence)
    mask = torch.ones(batch, sequence, dtype=torch.int64)
    mask[0, sequence // 2 :] = 0
    return {**made, "attention_mask": mask}


BATCH, SEQUENCE = Dim("batch"), Dim("sequence", max=512)

LLAMA = Case(
    name="llama",
    build=_llama,
    inputs=_ids(120),
    dims={"input_ids": {0: BATCH, 1: SEQUENCE}},
    plan={
        "model.embed_tokens": "embedding_rowwise",
        "model.layers.*.self_attn.q_proj": "colwise",
        "model.layers.*.self_attn.k_proj": "colwise",
        "model.layers.*.self_attn.v_proj": "colwise",
        "model.layers.*.self_attn.o_proj": "rowwise",
        "model.layers.*.mlp.gate_proj": "colwise",
        "model.layers.*.mlp.up_proj": "colwise",
        "model.layers.*.mlp.down_proj": "rowwise",
        "lm_head": "colwise_gather_output",
    },
    layers=2,
    per_layer=2,
    outside={"all_reduce": 1, "all_gather": 1},  # the embedding's sum, the logits that the plan gathers
)

MINILM = Case(
    name="minilm",
    build=Encoder,
    inputs=_masked,
    dims={"input_ids": {0: BATCH, 1: SEQUENCE}, "attention_mask": {0: BATCH, 1: SEQUENCE}},
    plan={
        "**.word_embeddings": "embedding_rowwise",
        "**.self.query": "colwise",
        "**.self.key": "colwise",
        "**.self.value": "colwise",
        "**.attention.output.dense": "rowwise",
        "**.intermediate.dense": "colwise",
        "**.layer.*.output.dense": "rowwise",
    },
    layers=6,
    per_layer=2,
    outside={"all_reduce": 1},
)

CASES = {case.name: case for case in (LLAMA, MINILM)}
