"""Encoders and decoders that attend to them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tests.zoo.build import transformer
from tests.zoo.case import BATCH, SEQUENCE, TARGET, Case, Layers, noise, randomise, source_and_target, token_ids
from tests.zoo.decoders import KEY_BIAS

VOCABULARY = 120
SIZES = {
    "d_model": 64,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 8,
    "decoder_attention_heads": 8,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": True,
    "use_cache": False,
}
LAYERS_CUT = {
    "**.q_proj": "colwise",
    "**.k_proj": "colwise",
    "**.v_proj": "colwise",
    "**.out_proj": "rowwise",
    "**.fc1": "colwise",
    "**.fc2": "rowwise",
}
# Self-attention and MLP; a decoder's layer has cross-attention besides.
LAYERS = (
    Layers("model.encoder.layers.*", 2, {"all_reduce": 2}),
    Layers("model.decoder.layers.*", 2, {"all_reduce": 3}),
)
IDS = {"input_ids": {0: BATCH, 1: SEQUENCE}, "decoder_input_ids": {0: BATCH, 1: TARGET}}


def _bart() -> torch.nn.Module:
    from transformers import BartConfig, BartForConditionalGeneration

    return randomise(BartForConditionalGeneration(BartConfig(**SIZES, max_position_embeddings=64)))


BART = Case(
    name="bart",
    build=_bart,
    inputs=source_and_target(VOCABULARY),
    dims=IDS,
    plan={"**.embed_tokens": "embedding_rowwise", **LAYERS_CUT, "lm_head": "colwise_gather_output"},
    layers=LAYERS,
    outside={"all_reduce": 2, "all_gather": 1},  # the table's rows for encoder and decoder; the logits
    cut=0.93,  # all but 10,624 of 167,296 numbers: 8,448 of positions, norms and row-wise biases
    inert={"k_proj.bias": KEY_BIAS},
)


def _whisper() -> torch.nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        **SIZES,
        num_mel_bins=16,
        max_source_positions=12,
        max_target_positions=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    return randomise(WhisperForConditionalGeneration(config))


def _speech(batch: int, sequence: int) -> dict[str, torch.Tensor]:
    """A spectrum of the one length that the encoder takes, and ids."""
    return {**noise("input_features", batch, 16, 24), **token_ids(VOCABULARY, "decoder_input_ids")(batch, sequence)}


WHISPER = Case(
    name="whisper",
    build=_whisper,
    inputs=_speech,
    tested="convolutions over time, cross-attention",
    dims={"input_features": {0: BATCH}, "decoder_input_ids": {0: BATCH, 1: TARGET}},
    plan={
        "model.encoder.conv1": "colwise",
        "model.encoder.conv2": "rowwise",
        "model.decoder.embed_tokens": "embedding_rowwise",
        **LAYERS_CUT,
        "proj_out": "colwise_gather_output",
    },
    layers=LAYERS,
    outside={"all_reduce": 2, "all_gather": 1},  # the second convolution, the table's rows; the logits
    cut=0.96,  # all but 2,816 numbers of positions, norms and row-wise biases; there is no bias of keys
    example=(2, 6),
    others=((3, 4), (1, 9)),
)


def _t5() -> torch.nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=48,  # 8 heads of 8 are 64
        d_kv=8,
        d_ff=96,
        num_layers=2,
        num_heads=8,
        vocab_size=VOCABULARY,
        tie_word_embeddings=True,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return randomise(T5ForConditionalGeneration(config))


T5_PLAN = {
    "**.embed_tokens": "embedding_rowwise",
    "**.q": "colwise",
    "**.k": "colwise",
    "**.v": "colwise",
    "**.o": "rowwise",
    "**.wo": "rowwise",
    "lm_head": "colwise_gather_output",
}

T5 = Case(
    name="t5",
    build=_t5,
    inputs=source_and_target(VOCABULARY),
    tested="relative positions, heads that are not the hidden size",
    dims=IDS,
    plan={**T5_PLAN, "**.wi": "colwise"},
    # Self-attention and MLP, and cross-attention besides.
    layers=(Layers("encoder.block.*", 2, {"all_reduce": 2}), Layers("decoder.block.*", 2, {"all_reduce": 3})),
    outside={"all_reduce": 2, "all_gather": 1},  # the table's rows for encoder and decoder; the logits
    cut=0.99,  # all but norms; the tables of relative positions follow the heads
)


def relative(name: str, family: str, cut: float, **different: Any) -> Case:
    """A case of a Hugging Face model of BART's layout."""
    return replace(
        BART,
        name=name,
        build=transformer(family, "ForConditionalGeneration", SIZES, max_position_embeddings=64, **different),
        cut=cut,
        flops=0.99,
        tested="",
    )


def gated(name: str, family: str, cut: float, **different: Any) -> Case:
    """A case of a Hugging Face model of T5's layout with a gated MLP."""
    return replace(
        T5,
        name=name,
        build=transformer(
            family,
            "ForConditionalGeneration",
            {},
            d_model=48,
            d_kv=8,
            d_ff=96,
            num_layers=2,
            num_heads=8,
            vocab_size=VOCABULARY,
            decoder_start_token_id=0,
            use_cache=False,
            **different,
        ),
        plan={**T5_PLAN, "**.wi_0": "colwise", "**.wi_1": "colwise"},
        cut=cut,
        flops=0.99,
        tested="",
    )


PROPHETNET = Case(
    name="prophetnet",
    build=transformer(
        "ProphetNet",
        "ForConditionalGeneration",
        {},
        hidden_size=64,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        num_encoder_layers=2,
        num_decoder_layers=2,
        num_encoder_attention_heads=8,
        num_decoder_attention_heads=8,
        vocab_size=VOCABULARY,
        max_position_embeddings=64,
        ngram=4,
        num_buckets=8,
        use_cache=False,
    ),
    inputs=source_and_target(VOCABULARY),
    dims={"input_ids": {0: BATCH}, "decoder_input_ids": {0: BATCH}},
    others=((3, 12), (1, 12)),
    plan={
        "prophetnet.word_embeddings.weight": "S(0)",
        "**.query_proj": "colwise",
        "**.key_proj": "colwise",
        "**.value_proj": "colwise",
        "**.out_proj": "rowwise",
        "**.feed_forward.intermediate": "colwise",
        "**.feed_forward.output": "rowwise",
        "lm_head": "colwise_gather_output",
        "prophetnet.decoder.layers.1": {"outputs": ["R"]},  # or else a batch that they divide is cut for the norm
    },
    # Self-attention and MLP, and cross-attention besides. The decoder's self-attention has a product for the main stream,
    # and one for those that look further ahead: one sum.
    layers=(
        Layers("prophetnet.encoder.layers.*", 2, {"all_reduce": 2}),
        Layers("prophetnet.decoder.layers.*", 2, {"all_reduce": 3}),
    ),
    outside={"all_reduce": 2, "all_gather": 1},  # the rows for encoder and decoder; the logits
    cut=0.89,  # 18,944 of 175,616 numbers whole: positions 16,384, n-grams 256, norms 1,536, biases 768
    inert={"key_proj.bias": KEY_BIAS},
    flops=0.93,  # the relative positions' products are whole: 2 layers x 35 tokens x 64 x 64 of 4.1 million
)

CASES = [BART, WHISPER, T5, PROPHETNET]
