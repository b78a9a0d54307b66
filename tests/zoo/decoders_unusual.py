"""Decoders of text whose layers are like no other's."""

from __future__ import annotations

from dataclasses import replace

from tests.zoo.case import BATCH
from tests.zoo.decoders import ATTENTION, GATED_MLP, VOCABULARY_CUT, decoder
from tests.zoo.decoders_planned import planned
from tests.zoo.experts import EXPERTS
from tests.zoo.state_space import LENGTH, only

MINIMAX = replace(
    decoder(
        "minimax",  # a state block by block, then attention; each head decays at its own rate
        "MiniMax",
        {
            **VOCABULARY_CUT,
            **ATTENTION,
            **EXPERTS,
            "**.qkv_proj": "colwise",  # packed by heads
            "**.output_gate": "colwise",
            "**.out_proj": "rowwise",
        },
        layer_types=["linear_attention", "full_attention"],
        block_size=4,
        num_local_experts=4,
        intermediate_size=24,
    ),
    dims={"input_ids": {0: BATCH}},
    example=(2, LENGTH),
    others=((3, LENGTH), (1, LENGTH)),
    # The norm over all heads, the output projection, the experts; the output projection, the experts.
    layers=(only("model.layers", 0, all_reduce=3), only("model.layers", 1, all_reduce=2)),
    cut=0.99,  # 85,056 of 85,888 numbers: not twice 256 of a router, 320 of norms
    flops=0.99,  # not 1,024 of 119,040 for a token without attention: the routers
)
LLAMA4 = replace(
    decoder(
        "llama4",  # complex rotations in chunks, then no positions and a temperature; all experts see all tokens
        "Llama4Text",
        {
            **VOCABULARY_CUT,
            **ATTENTION,
            "**.gate_proj": "colwise",
            "**.up_proj": "colwise",
            "**.down_proj": "rowwise",
            **EXPERTS,
        },
        head_dim=8,
        intermediate_size=24,
        intermediate_size_mlp=96,
        num_local_experts=4,
        interleave_moe_layer_step=2,
        attention_chunk_size=4,
        no_rope_layers=[1, 0],
        floor_scale=4,
    ),
    cut=0.99,  # 81,408 of 81,984 numbers: not 256 of the router, 320 of norms
    flops=0.99,  # not 512 of 154,112 for a token: the router
)
GEMMA3N = replace(
    decoder(
        "gemma3n",
        "Gemma3nText",
        planned,
        head_dim=8,
        hidden_size_per_layer_input=16,
        altup_num_inputs=2,
        num_kv_shared_layers=0,
        laurel_rank=8,
        vocab_size_per_layer_input=120,
        activation_sparsity_pattern=[0.0, 0.0],
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=4,
    ),
    cut=0.76,  # 69,120 of 90,760 numbers: not what AltUp, Laurel and the inputs of each layer add, nor norms
    flops=0.78,  # 144,384 of 183,296 for a token: not the same
)
DIFFLLAMA = replace(
    decoder("diffllama", "DiffLlama", {**VOCABULARY_CUT, **ATTENTION, **GATED_MLP}),
    tested="heads that are subtracted in halves, with keys and values that two ranks share",
    cut=0.99,  # 76,800 of 77,184 numbers: not 320 of norms, 64 of lambdas
    # On 4 ranks keys and values are made twice: 8,192 products for a token, of thrice 75,264 that could be repeated.
    flops=0.96,
)

CASES = [MINIMAX, LLAMA4, GEMMA3N, DIFFLLAMA]
