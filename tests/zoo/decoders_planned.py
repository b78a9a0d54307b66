"""Decoders of text that come with a plan: Hugging Face's own, and the table cut besides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from tests.zoo.case import Layers, hugging_face
from tests.zoo.decoders import LAYER, decoder

PARALLEL = (Layers(LAYER, 2, {"all_reduce": 1}),)
PACKED_CUT = {f"{LAYER}.self_attn.qkv_proj": "colwise", f"{LAYER}.mlp.gate_up_proj": "colwise"}


def planned(model: torch.nn.Module) -> Mapping[str, object]:
    return {**hugging_face(model), "model.embed_tokens": "embedding_rowwise"}


# x + attention(n(x)) + mlp(n(x)): both products are reduced as one sum. The logits are scaled; queries and keys are
# normalised head by head, with other weights for each head. 123 rows of the table lie 31, 31, 31, 30.
COHERE = replace(
    decoder("cohere", "Cohere", planned, use_qk_norm=True, vocab_size=123, logit_scale=0.3), layers=PARALLEL
)
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
ATTENTION_CUT = {f"{LAYER}.self_attn.{part}_proj": "colwise" for part in "qkv"}
OLMO2_CUT = replace(
    decoder("olmo2_cut", "Olmo2", lambda model: {**planned(model), **ATTENTION_CUT}),
    # What it costs where they stay cut: two sums of one number for each token.
    layers=(Layers(LAYER, 2, {"all_reduce": 4}),),
    tested="sums inside of a norm; Hugging Face's own plan",
)
# The plan would gather queries, keys and values, and gate and up.
PHI3 = replace(
    decoder("phi3", "Phi3", lambda model: {**planned(model), **PACKED_CUT}, pad_token_id=0),
    tested="queries beside fewer keys and values; gate beside up",
)
APERTUS = decoder("apertus", "Apertus", planned, head_dim=12)

CASES = [COHERE, GLM, OLMO2_CUT]
CASES += [PHI3, APERTUS]
