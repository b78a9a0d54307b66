"""Decoders of text from before there were plans: packed queries, keys and values; ALiBi; one kv head for all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tests.zoo.case import Case, Layers, Plan, randomise, token_ids
from tests.zoo.decoders import OUTSIDE, TOKENS, VOCABULARY

TRANSFORMER = "transformer.h.*"
HEAD = {"lm_head": "colwise_gather_output"}
TABLE = {"transformer.wte": "embedding_rowwise", **HEAD}
FALCON_TABLE = {"transformer.word_embeddings": "embedding_rowwise", **HEAD}
CLASSES = {"GPT2": "GPT2LMHeadModel", "CTRL": "CTRLLMHeadModel"}
SUMS = {"all_reduce": 2}  # attention's output projection, the MLP's second layer
ONE_SUM = {"all_reduce": 1}  # both of a parallel block, which are added first


def older(name: str, family: str, plan: Plan, path: str, each: dict[str, int], cut: float, **config: Any) -> Case:
    """A case of a Hugging Face causal language model of two layers, with all of its matrices cut."""

    def build() -> torch.nn.Module:
        import transformers

        made = getattr(transformers, f"{family}Config")(vocab_size=VOCABULARY, use_cache=False, **config)
        return randomise(getattr(transformers, CLASSES.get(family, f"{family}ForCausalLM"))(made))

    return Case(
        name=name,
        build=build,
        inputs=token_ids(VOCABULARY),
        dims=TOKENS,
        plan=plan,
        layers=(Layers(path, 2, each),),
        outside=OUTSIDE,
        cut=cut,
        flops=0.99,
    )


SMALL = {"n_embd": 64, "n_inner": 96, "n_layer": 2, "n_head": 8, "n_positions": 64}
ATTENTION_PACKED = {"**.c_attn": "colwise", "**.attn.c_proj": "rowwise"}
CONVOLUTIONS = {"**.mlp.c_fc": "colwise", "**.mlp.c_proj": "rowwise"}
IN_OUT = {"**.out_proj": "rowwise", "**.fc_in": "colwise", "**.fc_out": "rowwise"}

GPT2 = older(
    "gpt2",
    "GPT2",
    {**TABLE, **ATTENTION_PACKED, **CONVOLUTIONS},
    TRANSFORMER,
    SUMS,
    0.92,  # 65,600 of 70,592 numbers: not 4,096 of positions, 896 of norms and row-wise biases
    scale_attn_by_inverse_layer_idx=True,
    **SMALL,
)
GPT2 = replace(GPT2, tested="queries, keys and values in a row")
GPT_BIGCODE = older(
    "gpt_bigcode",
    "GPTBigCode",
    {**TABLE, **ATTENTION_PACKED, **CONVOLUTIONS},
    TRANSFORMER,
    SUMS,
    0.91,  # 51,040 of 56,032 numbers: not 4,096 of positions, 896 of norms and row-wise biases
    **SMALL,
)
# 8 query heads share one kv head, which every rank makes: 2,048 of at least 53,000 FLOPs for each token and layer.
GPT_BIGCODE = replace(GPT_BIGCODE, flops=0.96, tested="one kv head for all ranks, packed")
GPTJ = older(
    "gptj",
    "GPTJ",
    {**TABLE, "**.q_proj": "colwise", "**.k_proj": "colwise", "**.v_proj": "colwise", **IN_OUT},
    TRANSFORMER,
    ONE_SUM,
    0.99,  # 73,016 of 73,528 numbers: not 512 of norms and row-wise biases
    rotary_dim=4,
    **SMALL,
)
# Its packed layer comes in 4 blocks of 2 heads' queries, values and keys, so that 2 or 4 ranks have whole blocks.
CODEGEN = older(
    "codegen",
    "CodeGen",
    {**TABLE, "**.qkv_proj": "colwise", **IN_OUT},
    TRANSFORMER,
    ONE_SUM,
    0.99,
    rotary_dim=4,
    **SMALL,
)

QKV_BY_HEAD = {
    "**.query_key_value": "colwise",
    "**.dense": "rowwise",
    "**.dense_h_to_4h": "colwise",
    "**.dense_4h_to_h": "rowwise",
}
# Attention merges batch and heads into one dim, of which heads are the inner part.
BLOOM = older(
    "bloom",
    "Bloom",
    {**FALCON_TABLE, **QKV_BY_HEAD},
    TRANSFORMER,
    SUMS,
    0.99,  # 106,880 of 107,904 numbers: not 1,024 of norms and row-wise biases
    hidden_size=64,
    n_layer=2,
    n_head=8,
)
BLOOM = replace(BLOOM, tested="heads inside of a merged dim")
FALCON = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8, "ffn_hidden_size": 96}
# Attention and MLP are added to each other first, so that one sum serves both.
FALCON_7B = older(
    "falcon_7b",  # 8 query heads share one kv head, packed in ten
    "Falcon",
    {**FALCON_TABLE, **QKV_BY_HEAD, "**.query_key_value": "colwise"},
    TRANSFORMER,
    {"all_reduce": 1},
    0.99,  # 50,688 of 51,072 numbers: not 384 of norms
    **FALCON,
)
# All ranks make the one head's keys and values: 2 layers x 2 x 8 x 64 weights, 4,096 of 107,520 FLOPs for a token.
FALCON_7B = replace(FALCON_7B, flops=0.96, tested="one kv head, packed with those of the queries")


CASES = [GPT2, GPT_BIGCODE, GPTJ, CODEGEN, BLOOM, FALCON_7B]
