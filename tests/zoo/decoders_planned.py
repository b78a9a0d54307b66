"""Decoders of text that come with a plan: Hugging Face's own, and the table cut besides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from tests.zoo.case import Layers, hugging_face
from tests.zoo.decoders import LAYER, decoder

PARALLEL = (Layers(LAYER, 2, {"all_reduce": 1}),)
GATHERED_MLP = (Layers(LAYER, 2, {"all_gather": 1, "all_reduce": 2}),)  # the packed gate and up as the plan says
PACKED_CUT = {f"{LAYER}.self_attn.qkv_proj": "colwise", f"{LAYER}.mlp.gate_up_proj": "colwise"}


def planned(model: torch.nn.Module) -> Mapping[str, object]:
    return {**hugging_face(model), "model.embed_tokens": "embedding_rowwise"}


# x + attention(n(x)) + mlp(n(x)): both products are reduced as one sum. The logits are scaled; queries and keys are
# normalised head by head, with other weights for each head. 123 rows of the table lie 31, 31, 31, 30.
COHERE = replace(
    decoder("cohere", "Cohere", planned, use_qk_norm=True, vocab_size=123, logit_scale=0.3), layers=PARALLEL
)
# Three of four layers have a window, the last sees everything and has no positions.
COHERE2 = replace(
    decoder("cohere2", "Cohere2", planned, num_hidden_layers=4, sliding_window=4, tie_word_embeddings=False),
    layers=(Layers(LAYER, 4, {"all_reduce": 1}),),
)
GEMMA3 = decoder("gemma3", "Gemma3Text", planned, head_dim=12, sliding_window=4, tie_word_embeddings=True)
# 94 features of gate and up each lie 24, 24, 24, 22, where the plan would gather what it packs.
GLM = decoder(
    "glm",
    "Glm",
    lambda model: {**planned(model), f"{LAYER}.mlp.gate_up_proj": "colwise"},
    head_dim=8,
    intermediate_size=94,
    pad_token_id=0,
    attention_bias=True,
)
GLM4 = replace(decoder("glm4", "Glm4", planned, head_dim=12, pad_token_id=0), layers=GATHERED_MLP)
GRANITE = decoder(
    "granite", "Granite", planned, embedding_multiplier=3.0, logits_scaling=2.0, residual_multiplier=0.7, mlp_bias=True
)
NEMOTRON = decoder("nemotron", "Nemotron", planned, head_dim=12)
SMOLLM3 = decoder("smollm3", "SmolLM3", planned, no_rope_layers=[1, 0], pad_token_id=0)
EXAONE4 = decoder("exaone4", "Exaone4", planned, sliding_window=4, layer_types=["sliding_attention", "full_attention"])
HELIUM = decoder("helium", "Helium", planned, head_dim=8, pad_token_id=0)
OLMO = replace(decoder("olmo", "Olmo", planned, clip_qkv=1.0), cut=1.0)  # its norms have no weights
OLMO2 = replace(
    decoder("olmo2", "Olmo2", planned),
    # Queries and keys are normalised over all heads: the plan gathers them, and the values besides, which stay cut.
    layers=(Layers(LAYER, 2, {"all_gather": 2, "all_reduce": 2}),),
)
ATTENTION_CUT = {f"{LAYER}.self_attn.{part}_proj": "colwise" for part in "qkv"}
OLMO2_CUT = replace(
    decoder("olmo2_cut", "Olmo2", lambda model: {**planned(model), **ATTENTION_CUT}),
    # What it costs where they stay cut: two sums of one number for each token.
    layers=(Layers(LAYER, 2, {"all_reduce": 4}),),
    tested="sums inside of a norm; Hugging Face's own plan",
)
PHI = replace(decoder("phi", "Phi", planned, partial_rotary_factor=0.5), layers=PARALLEL)
# The plan would gather queries, keys and values, and gate and up.
PHI3 = replace(
    decoder("phi3", "Phi3", lambda model: {**planned(model), **PACKED_CUT}, pad_token_id=0),
    tested="queries beside fewer keys and values; gate beside up",
)
# 57,280 of 58,176 numbers: not 896 of norms and row-wise biases.
STARCODER2 = replace(decoder("starcoder2", "Starcoder2", planned, sliding_window=4), cut=0.98)
APERTUS = decoder("apertus", "Apertus", planned, head_dim=12)
ARCEE = decoder("arcee", "Arcee", planned, head_dim=12)
SEED_OSS = decoder("seed_oss", "SeedOss", planned, head_dim=12, attention_bias=True)
ERNIE = decoder("ernie4_5", "Ernie4_5", planned, use_bias=True)
NANOCHAT = decoder("nanochat", "NanoChat", planned, head_dim=8)
VAULTGEMMA = decoder("vaultgemma", "VaultGemma", planned, head_dim=12, sliding_window=4)

CASES = [COHERE, COHERE2, GEMMA3, GLM, GLM4, GRANITE, NEMOTRON, SMOLLM3, EXAONE4, HELIUM, OLMO, OLMO2, OLMO2_CUT, PHI]
CASES += [PHI3, STARCODER2, APERTUS, ARCEE, SEED_OSS, ERNIE, NANOCHAT, VAULTGEMMA]
