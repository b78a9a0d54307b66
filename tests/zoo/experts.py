"""Mixtures of experts: every expert is cut inside, and what is summed over the ranks is the sum of all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tests.zoo.case import Case, Layers
from tests.zoo.decoders import ATTENTION, LAYER, VOCABULARY_CUT, decoder
from tests.zoo.decoders_planned import planned

# As Hugging Face's own plans have it, where these have experts.
EXPERTS = {"**.experts.gate_up_proj": "packed_colwise", "**.experts.down_proj": "rowwise"}
FOUR = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def experts(
    name: str, family: str, plan: Any, each: Mapping[str, int], cut: float, flops: float, **config: Any
) -> Case:
    case = decoder(name, family, plan, **config)
    return replace(case, layers=(Layers(LAYER, 2, each),), cut=cut, flops=flops)


QWEN3_MOE = experts(
    "qwen3_moe",
    "Qwen3Moe",
    planned,
    {"all_reduce": 2},
    0.98,  # 76,800 of 77,664 numbers: not twice 256 of the router, 144 of norms, 64 of the last one
    0.99,  # not twice 512 of 108,544 for a token: the router
    head_dim=8,
    **FOUR,
)
QWEN2_MOE = experts(
    "qwen2_moe",
    "Qwen2Moe",
    lambda model: {
        **planned(model),
        **{f"{LAYER}.mlp.shared_expert.{part}_proj": "colwise" for part in ("gate", "up")},
        f"{LAYER}.mlp.shared_expert.down_proj": "rowwise",
    },
    {"all_reduce": 2},  # attention; the routed and the shared experts together
    0.98,  # 92,416 of 93,376 numbers: not twice 320 of the router and the shared gate, 128 of norms, 64 of the last one
    0.99,  # not twice 640 of 139,520 for a token: the router and the gate
    shared_expert_intermediate_size=40,
    **FOUR,
)
# Hugging Face's own plan deals out the experts, their biases too; each head's sink is cut as the heads are.
DEALT_OUT = {f"**.experts.{part}_proj{bias}": "grouped_gemm" for part in ("gate_up", "down") for bias in ("", "_bias")}
GPT_OSS = experts(
    "gpt_oss",
    "GptOss",
    {**VOCABULARY_CUT, **ATTENTION, **DEALT_OUT, "**.experts": "ep_dispatch_experts"},
    {"all_reduce": 2},
    0.98,  # 77,968 of 78,936 numbers: not twice 260 of the router, 192 of norms and a row-wise bias
    0.65,  # counted with every row for every expert; a rank multiplies the rows of its own experts alone
    head_dim=8,
    num_local_experts=4,
    num_experts_per_tok=2,
    intermediate_size=24,
    sliding_window=4,
)
LOW_RANK = {
    "num_key_value_heads": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
DEEPSEEK_V3 = experts(
    "deepseek_v3",
    "DeepseekV3",
    lambda model: {
        **planned(model),
        f"{LAYER}.self_attn.q_b_proj": "colwise",
        f"{LAYER}.self_attn.kv_b_proj": "colwise",
        f"{LAYER}.self_attn.o_proj": "rowwise",
    },
    {"all_reduce": 2},
    0.92,
    0.91,
    n_group=2,
    topk_group=1,
    **LOW_RANK,
)
DEEPSEEK_V3 = replace(DEEPSEEK_V3, tested="low-rank attention, a router in groups")
MIXTRAL_CUT = replace(
    decoder(
        "mixtral_cut",
        "Mixtral",
        {
            **VOCABULARY_CUT,
            **ATTENTION,
            f"{LAYER}.mlp.experts.gate_up_proj": "S(1, parts 96 96)",
            f"{LAYER}.mlp.experts.down_proj": "S(2)",
        },
        num_local_experts=4,
        experts_implementation="batched_mm",
    ),
    layers=(Layers(LAYER, 2, {"all_reduce": 2}),),  # attention, the experts
    cut=0.99,  # not 832 of 188,224 numbers: routers and norms
    flops=0.99,  # not 512 of 109,568 for a token: the routers
)

CASES = [QWEN3_MOE, QWEN2_MOE, GPT_OSS, DEEPSEEK_V3]
CASES += [MIXTRAL_CUT]
