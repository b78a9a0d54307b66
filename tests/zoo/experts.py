"""Mixtures of experts: attention and shared experts are cut, the routed experts run on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from tests.zoo.case import Case, Layers
from tests.zoo.decoders import ATTENTION, LAYER, VOCABULARY_CUT, decoder
from tests.zoo.decoders_planned import ATTENTION_CUT, planned

NO_STYLE = "the routed experts' weights cut, for one more sum: their styles do not exist yet"
FOUR = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def without_experts(model: torch.nn.Module) -> Mapping[str, object]:
    return {pattern: style for pattern, style in planned(model).items() if ".experts" not in pattern}


def experts(
    name: str, family: str, plan: Any, each: Mapping[str, int], cut: float, flops: float, **config: Any
) -> Case:
    case = decoder(name, family, plan, **config)
    return replace(case, layers=(Layers(LAYER, 2, each),), cut=cut, flops=flops, pending=NO_STYLE)


QWEN3_MOE = experts(
    "qwen3_moe",
    "Qwen3Moe",
    without_experts,
    {"all_reduce": 1},
    0.51,  # 39,936 of 77,664 numbers: not twice 18,432 of experts, 256 of the router, 144 of norms
    0.65,  # 70,656 of 108,544 for a token: not twice 512 for the router, 18,432 for two experts
    head_dim=8,
    **FOUR,
)
QWEN2_MOE = experts(
    "qwen2_moe",
    "Qwen2Moe",
    lambda model: {
        **without_experts(model),
        **{f"{LAYER}.mlp.shared_expert.{part}_proj": "colwise" for part in ("gate", "up")},
        f"{LAYER}.mlp.shared_expert.down_proj": "rowwise",
    },
    {"all_reduce": 2},  # attention, the shared expert
    0.59,  # 55,552 of 93,376 numbers: not twice 18,432 of experts, 320 of the router and the shared gate, 128 of norms
    0.72,  # 101,376 of 139,520 for a token: not twice 640 for the router and the gate, 18,432 for two experts
    shared_expert_intermediate_size=40,
    **FOUR,
)
OLMOE = experts(
    "olmoe",
    "Olmoe",
    lambda model: {**without_experts(model), **ATTENTION_CUT},
    {"all_reduce": 3},  # attention; the norms of queries and of keys over all heads, one number for each token
    0.51,  # 40,128 of 77,824 numbers: not twice 18,432 of experts, 256 of the router, 128 of norms
    0.65,  # as for Qwen3
    num_experts=4,
    num_experts_per_tok=2,
    intermediate_size=24,
)
GPT_OSS = experts(
    "gpt_oss",  # each head's sink takes part in its softmax: sinks are cut as the heads are
    "GptOss",
    {**VOCABULARY_CUT, **ATTENTION},
    {"all_reduce": 1},
    0.50,  # 40,208 of 78,936 numbers: not twice 18,880 of experts, 260 of the router, 192 of norms and a row-wise bias
    0.65,
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
# Attention and the dense MLP; attention and the shared experts.
# Cut: 59,904 of 84,624 numbers: not 18,688 of the router and the experts, twice 2,984 of low-rank projections and norms.
# FLOPs: 112,128 of 142,336 for a token: not 18,944 for the router and two experts, 11,264 for the low-rank projections.
DEEPSEEK_V2 = experts("deepseek_v2", "DeepseekV2", without_experts, {"all_reduce": 2}, 0.7, 0.78, **LOW_RANK)
DEEPSEEK_V3 = experts(
    "deepseek_v3",
    "DeepseekV3",
    lambda model: {
        **without_experts(model),
        f"{LAYER}.self_attn.q_b_proj": "colwise",
        f"{LAYER}.self_attn.kv_b_proj": "colwise",
        f"{LAYER}.self_attn.o_proj": "rowwise",
    },
    {"all_reduce": 2},
    0.7,
    0.78,
    n_group=2,
    topk_group=1,
    **LOW_RANK,
)
DEEPSEEK_V3 = replace(DEEPSEEK_V3, tested="low-rank attention, a router in groups")
GLM4_MOE = experts(
    "glm4_moe",
    "Glm4Moe",
    without_experts,
    {"all_reduce": 2},
    0.78,  # 67,584 of 86,592 numbers: not 18,688 of the router and the experts, 320 of norms
    0.86,  # 125,952 of 144,896 for a token: not 512 for the router, 18,432 for two experts
    head_dim=8,
    n_routed_experts=4,
    n_shared_experts=2,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    first_k_dense_replace=1,
    n_group=2,
    topk_group=1,
)
GRANITE_MOE = experts(
    "granitemoe",
    "GraniteMoe",
    {**VOCABULARY_CUT, **ATTENTION},
    {"all_reduce": 1},
    0.51,  # as for Qwen3, without norms of heads
    0.65,
    num_local_experts=4,
    num_experts_per_tok=2,
    intermediate_size=24,
)
PHIMOE = experts(
    "phimoe",
    "Phimoe",
    {**VOCABULARY_CUT, **ATTENTION},
    {"all_reduce": 1},
    0.51,  # as for Qwen3, and biases of norms
    0.65,
    num_local_experts=4,
    num_experts_per_tok=2,
    intermediate_size=24,
)
ERNIE_MOE = experts(
    "ernie4_5_moe",
    "Ernie4_5_Moe",
    without_experts,
    {"all_reduce": 2},
    0.74,  # 55,296 of 74,308 numbers: not 18,692 of the router and the experts, 320 of norms
    0.86,  # 116,736 of 135,680 for a token: not 512 for the router, 18,432 for two experts
    moe_num_experts=4,
    moe_k=2,
    moe_intermediate_size=24,
    moe_num_shared_experts=1,
    moe_layer_start_index=1,
    moe_layer_end_index=-1,
    moe_layer_interval=1,
)
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

CASES = [QWEN3_MOE, QWEN2_MOE, OLMOE, GPT_OSS, DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE, GRANITE_MOE, PHIMOE, ERNIE_MOE]
CASES += [MIXTRAL_CUT]
