"""Networks that hear."""

from __future__ import annotations

import torch
from torch.export import Dim

from tests.zoo.build import transformer
from tests.zoo.case import BATCH, Case, Layers, noise
from tests.zoo.decoders import KEY_BIAS

SPEECH = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "conv_dim": [16, 24],
    "conv_stride": [5, 2],
    "conv_kernel": [10, 3],
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "apply_spec_augment": False,
}
LAYERS = {
    "**.q_proj": "colwise",
    "**.k_proj": "colwise",
    "**.v_proj": "colwise",
    "**.out_proj": "rowwise",
    "**.intermediate_dense": "colwise",
    "**.output_dense": "rowwise",
}


def _wave(batch: int, size: int) -> dict[str, torch.Tensor]:
    return noise("input_values", batch, size)


SOUND = {"input_values": {0: BATCH, 1: 10 * Dim("tens", min=7)}}

# Whole in each: the first convolutions, and the convolution for positions, whose norm is over all of its filters.
WAV2VEC2 = Case(
    name="wav2vec2",
    build=transformer("Wav2Vec2", "ForCTC", SPEECH, vocab_size=30, num_feat_extract_layers=2, pad_token_id=0),
    inputs=_wave,
    dims=SOUND,
    example=(2, 160),
    others=((3, 130), (1, 90)),
    plan={
        "**.feature_projection.projection": "colwise_gather_output",
        **LAYERS,
        "lm_head": "colwise_gather_output",
    },
    layers=(Layers("wav2vec2.encoder.layers.*", 2, {"all_reduce": 2}),),
    outside={"all_gather": 2},  # the features, the scores
    # 10,616 of 72,086 numbers whole: 8,200 of positions, first convolutions 1,312, norms 720, biases 320, a mask 64
    cut=0.85,
    inert={"k_proj.bias": KEY_BIAS, "masked_spec_embed": "nothing is masked"},
    flops=0.86,
)


CASES = [WAV2VEC2]
