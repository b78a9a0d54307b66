"""Decoders of text that carry a state along instead of attention, or beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tests.zoo.case import BATCH, Case, Layers, Plan, hugging_face, randomise, token_ids
from tests.zoo.decoders import OUTSIDE, SIZES, VOCABULARY

LENGTH = 6  # a scan over it is taken apart, step by step


def recurrent(name: str, family: str, plan: Plan, layers: tuple[Layers, ...], cut: float, **stated: Any) -> Case:
    """A case of a Hugging Face causal language model; `config` in `stated` is its config's."""
    config = stated.pop("config")

    def build() -> torch.nn.Module:
        import transformers

        made = getattr(transformers, f"{family}Config")(vocab_size=VOCABULARY, use_cache=False, **config)
        return randomise(getattr(transformers, f"{family}ForCausalLM")(made))

    return Case(
        name=name,
        build=build,
        inputs=token_ids(VOCABULARY),
        dims={"input_ids": {0: BATCH}},
        example=(2, LENGTH),
        others=stated.pop("others", ((3, LENGTH), (1, LENGTH))),
        plan=plan,
        layers=layers,
        outside=OUTSIDE,
        cut=cut,
        **stated,
    )


def only(path: str, number: int, **each: int) -> Layers:
    return Layers(f"{path}.{number}", 1, each)


MIXER = {
    "**.in_proj": "colwise",
    "**.x_proj": "rowwise",
    "**.dt_proj": "colwise",
    "**.out_proj": "rowwise",
}
BACKBONE = {"backbone.embeddings": "embedding_rowwise", "lm_head": "colwise_gather_output"}
MAMBA_SIZES = {"hidden_size": 64, "state_size": 8, "num_hidden_layers": 2}
# B, C and the step sizes are summed over the channels; the output projection.
SCANS = (Layers("backbone.layers.*", 2, {"all_reduce": 2}),)
# Cut: 63,232 of 67,008 numbers: not 320 of norms, twice 640 of convolutions, 1,024 of A and 128 of D.
MAMBA = recurrent("mamba", "Mamba", {**BACKBONE, **MIXER}, SCANS, 0.94, config=MAMBA_SIZES)
MAMBA2 = recurrent(
    "mamba2",
    "Mamba2",
    {**BACKBONE, "**.in_proj": "colwise", "**.out_proj": "rowwise"},
    (Layers("backbone.layers.*", 2, {"all_reduce": 1}),),
    0.99,  # 75,904 of 76,096 numbers: not 192 of norms
    config={**MAMBA_SIZES, "num_heads": 8, "head_dim": 16, "n_groups": 4, "chunk_size": 4},
    others=((4, LENGTH), (1, LENGTH)),  # with the ids of (3, LENGTH) float32 itself is off by more than may be allowed
)
RWKV = recurrent(
    "rwkv",
    "Rwkv",
    {
        "rwkv.embeddings": "embedding_rowwise",
        "head": "colwise_gather_output",
        "**.attention.key": "colwise",
        "**.attention.value": "colwise",
        "**.attention.receptance": "colwise",
        "**.attention.output": "rowwise",
        "**.feed_forward.key": "colwise",
        "**.feed_forward.value": "rowwise",
    },
    (Layers("rwkv.blocks.*", 2, {"all_reduce": 2}),),
    0.88,  # 72,832 of 82,560 numbers: not twice 4,096 of a receptance and 640 of decay, mixtures and norms, 256 of norms
    config={
        "hidden_size": 64,
        "attention_hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "rescale_every": 0,
    },
    tested="a scan, step by step",
)
SIZES_WITHOUT_VOCABULARY = {k: v for k, v in SIZES.items() if k not in ("vocab_size", "use_cache")}
ATTENTION = {"**.q_proj": "colwise", "**.k_proj": "colwise", "**.v_proj": "colwise", "**.o_proj": "rowwise"}


def _qwen3_next(model: torch.nn.Module) -> Mapping[str, object]:
    plan = hugging_face(model)
    packed = {f"model.layers.*.linear_attn.in_proj_{part}": "colwise" for part in ("qkvz", "ba")}
    return {
        **plan,
        **packed,
        "model.layers.*.linear_attn.out_proj": "rowwise",
        "model.embed_tokens": "embedding_rowwise",
    }


QWEN3_NEXT = recurrent(
    "qwen3_next",
    "Qwen3Next",
    _qwen3_next,
    (Layers("model.layers.*", 2, {"all_reduce": 2}),),  # attention of either kind; all experts
    0.99,
    config={
        **SIZES_WITHOUT_VOCABULARY,
        "head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": 8,
        "linear_num_key_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
    },
)

CASES = [MAMBA, MAMBA2, RWKV, QWEN3_NEXT]
