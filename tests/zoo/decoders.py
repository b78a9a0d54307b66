"""Decoders of text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tests.zoo.case import BATCH, SEQUENCE, Case, Layers, Plan, randomise, token_ids

VOCABULARY = 120
KEY_BIAS = "it adds the same to all scores of a query, which the softmax does not see"
LAYER = "model.layers.*"
TOKENS = {"input_ids": {0: BATCH, 1: SEQUENCE}}
# 8 heads share 4 kv heads, and heads * head_dim need not be the hidden size.
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": VOCABULARY,
    "use_cache": False,
}
ATTENTION = {
    f"{LAYER}.self_attn.q_proj": "colwise",
    f"{LAYER}.self_attn.k_proj": "colwise",
    f"{LAYER}.self_attn.v_proj": "colwise",
    f"{LAYER}.self_attn.o_proj": "rowwise",
}
GATED_MLP = {
    f"{LAYER}.mlp.gate_proj": "colwise",
    f"{LAYER}.mlp.up_proj": "colwise",
    f"{LAYER}.mlp.down_proj": "rowwise",
}
VOCABULARY_CUT = {"model.embed_tokens": "embedding_rowwise", "lm_head": "colwise_gather_output"}
# The table's rows are summed over the ranks; the logits are gathered as the plan says.
OUTSIDE = {"all_reduce": 1, "all_gather": 1}
TWO_SUMS = (Layers(LAYER, 2, {"all_reduce": 2}),)  # attention's output projection, the MLP's second layer


def decoder(name: str, family: str, plan: Plan, **different: Any) -> Case:
    """A case of a Hugging Face causal language model of Llama's layout, with all of its matrices cut."""
    sizes = {**SIZES, **different}

    def build() -> torch.nn.Module:
        import transformers

        config = getattr(transformers, f"{family}Config")(**sizes)
        return randomise(getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config))

    return Case(
        name=name,
        build=build,
        inputs=token_ids(VOCABULARY),
        dims=TOKENS,
        plan=plan,
        layers=TWO_SUMS,
        outside=OUTSIDE,
        cut=0.99,  # all but the norms' 64 numbers each
        # All, but for the plans that gather queries, keys and values: attention itself is then repeated, 4 * 12 * 64
        # of 70,000 FLOPs for each token and layer.
        flops=0.95,
    )


EVERYTHING = {**VOCABULARY_CUT, **ATTENTION, **GATED_MLP}
LLAMA = replace(decoder("llama", "Llama", EVERYTHING), tested="grouped queries, the plainest")
# Two kv heads for four ranks, one for all: a plan of the plainest kind, whose key and value rows ranks share.
LLAMA_TWO_KV = replace(
    decoder("llama_2_kv", "Llama", EVERYTHING, num_key_value_heads=2), flops=0.97, tested="kv heads that ranks share"
)
LLAMA_ONE_KV = replace(
    decoder("llama_1_kv", "Llama", EVERYTHING, num_key_value_heads=1),
    # One kv head's keys and values, 2,048 of 70,976 numbers, are on every rank.
    cut=0.96,
    flops=0.96,
    tested="one kv head for all ranks",
)
QWEN3 = decoder("qwen3", "Qwen3", EVERYTHING, hidden_size=48, head_dim=16, tie_word_embeddings=True)
GEMMA2 = replace(
    decoder(
        "gemma2",
        "Gemma2",
        EVERYTHING,
        hidden_size=48,
        head_dim=8,
        sliding_window=4,
        # Caps as small as the scores, so that they matter; only the eager attention has one.
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
        attn_implementation="eager",
        tie_word_embeddings=True,
    ),
    tested="attention by hand, caps, windows, a tied table",
)


def _opt() -> torch.nn.Module:
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(
        hidden_size=64,
        ffn_dim=96,
        num_hidden_layers=2,
        num_attention_heads=8,
        vocab_size=VOCABULARY,
        word_embed_proj_dim=64,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return randomise(OPTForCausalLM(config))


OPT = Case(
    name="opt",
    build=_opt,
    inputs=token_ids(VOCABULARY),
    tested="biases, learned positions",
    dims=TOKENS,
    plan={
        "model.decoder.embed_tokens": "embedding_rowwise",
        "**.q_proj": "colwise",
        "**.k_proj": "colwise",
        "**.v_proj": "colwise",
        "**.out_proj": "rowwise",
        "**.fc1": "colwise",
        "**.fc2": "rowwise",
        "lm_head": "colwise_gather_output",
    },
    layers=(Layers("model.decoder.layers.*", 2, {"all_reduce": 2}),),
    outside=OUTSIDE,
    cut=0.92,  # 65,600 of 70,720 numbers: not 4,224 of positions, 896 of norms and row-wise biases
    inert={"k_proj.bias": KEY_BIAS},
)


def _gpt_neox() -> torch.nn.Module:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=8,
        vocab_size=VOCABULARY,
        use_parallel_residual=True,
        use_cache=False,
    )
    return randomise(GPTNeoXForCausalLM(config))


GPT_NEOX = Case(
    name="gpt_neox",
    build=_gpt_neox,
    inputs=token_ids(VOCABULARY),
    tested="packed by heads",
    dims=TOKENS,
    plan={
        "gpt_neox.embed_in": "embedding_rowwise",
        "**.query_key_value": "colwise",  # packed head by head, so that a cut between heads keeps each head's q, k, v
        "**.attention.dense": "rowwise",
        "**.dense_h_to_4h": "colwise",
        "**.dense_4h_to_h": "rowwise",
        "lm_head": "colwise_gather_output",
    },
    # x + attention(n1(x)) + mlp(n2(x)): the sum of both products is reduced.
    layers=(Layers("gpt_neox.layers.*", 2, {"all_reduce": 1}),),
    outside=OUTSIDE,
    cut=0.98,  # all but norms and row-wise biases: 6 * 64 of the 29,344 numbers of a layer, 2 * 64 at the end
)

# The router and the experts are on every rank, so their sum needs no collective: attention's is the only one.
MIXTRAL = replace(
    decoder("mixtral", "Mixtral", {**VOCABULARY_CUT, **ATTENTION}, num_local_experts=4),
    layers=(Layers(LAYER, 2, {"all_reduce": 1}),),
    tested="a router, and experts of its own op",
    # 39,936 of 188,224 numbers: twice 12,288 of attention, 15,360 of vocabulary. The experts have 147,456.
    cut=0.21,
    # A token: 32,256 of attention's weights and the head, 3,072 of scores, of 109,568: two of the experts take 73,728.
    flops=0.32,
)

CASES = [LLAMA, LLAMA_TWO_KV, LLAMA_ONE_KV, QWEN3, GEMMA2, OPT, GPT_NEOX, MIXTRAL]
