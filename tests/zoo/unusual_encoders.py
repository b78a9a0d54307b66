"""Encoders of text that attend, mix or pack in ways of their own."""

from __future__ import annotations

from dataclasses import replace

from tests.zoo.case import BATCH, Layers, token_ids
from tests.zoo.decoders import KEY_BIAS
from tests.zoo.encoders import (
    ANY_LENGTH,
    EACH,
    LAYERS,
    MLP,
    PLACES,
    POOLER,
    ROWS,
    TABLE,
    VOCABULARY,
    encoder,
)

BATCHES = {"input_ids": {0: BATCH}, "attention_mask": {0: BATCH}}

DEBERTA = encoder(
    "deberta_v2",
    "DebertaV2",
    "Model",
    {
        **TABLE,
        **MLP,
        "**.query_proj": "colwise",
        "**.key_proj": "colwise",
        "**.value_proj": "colwise",
        "**.pos_key_proj": "colwise",
        "**.pos_query_proj": "colwise",
        "**.attention.output.dense": "rowwise",
    },
    outside=ROWS,
    different={
        "relative_attention": True,
        "max_relative_positions": 16,
        "pos_att_type": ["c2p", "p2c"],
        "position_biased_input": False,
    },
    cut=0.96,  # 2,944 of 85,184 numbers whole: relative positions 2,048, norms 640, row-wise biases 256
    inert={"pos_key_proj.bias": KEY_BIAS},
)
DEBERTA = replace(DEBERTA, tested="disentangled positions")


CONVBERT = encoder(
    "convbert",
    "ConvBert",
    "Model",
    {
        **TABLE,
        **LAYERS,
        "**.key_conv_attn_layer.pointwise": "colwise",
        "**.conv_kernel_layer": "rowwise",
        "**.conv_out_layer": "colwise",
    },
    # The kernels besides, which are made of queries and keys of all heads, and used head by head.
    layers=(Layers("encoder.layer.*", 2, {"all_reduce": 2, "reduce_scatter": 1}),),
    outside=ROWS,
    different={"embedding_size": 64, "conv_kernel_size": 3},
    # 5,528 of 67,736 numbers whole: positions and types 4,224, norms 640, depth-wise 384, row-wise biases 280
    cut=0.91,
    flops=0.98,
    tested="heads of attention and of convolutions put together",
)

XLNET = encoder(
    "xlnet",
    "XLNet",
    "Model",
    {
        "word_embedding": "embedding_rowwise",
        "**.rel_attn.q": "S(1)",
        "**.rel_attn.k": "S(1)",
        "**.rel_attn.v": "S(1)",
        "**.rel_attn.r": "S(1)",
        "**.rel_attn.o": "S(1)",
        "**.layer_1": "colwise",
        "**.layer_2": "rowwise",
    },
    path="layer.*",
    outside=ROWS,
    dims=BATCHES,
    others=((3, 12), (1, 12)),
    sizes={"d_model": 64, "d_inner": 96, "n_layer": 2, "n_head": 8, "vocab_size": VOCABULARY, "use_mems_eval": False},
    cut=0.98,  # 1,088 of 74,752 numbers whole: norms 512, segments 256, row-wise biases 256, a mask 64
    inert={"r_s_bias": "no segments are given", "seg_embed": "the same"},
)

FUNNEL = encoder(
    "funnel",
    "Funnel",
    "Model",
    {
        **TABLE,
        "**.q_head": "colwise",
        "**.k_head": "colwise",
        "**.v_head": "colwise",
        "**.r_kernel": "S(1)",
        "**.post_proj": "rowwise",
        "**.linear_1": "colwise",
        "**.linear_2": "rowwise",
    },
    layers=(Layers("encoder.blocks.*.0", 2, EACH), Layers("decoder.layers.*", 1, EACH)),
    outside=ROWS,
    dims=BATCHES,
    others=((3, 12), (1, 12)),
    sizes={"d_model": 64, "d_inner": 96, "n_head": 8, "d_head": 8, "vocab_size": VOCABULARY},
    different={"block_sizes": [1, 1], "num_decoder_layers": 1},
    cut=0.98,  # 1,856 of 108,896 numbers whole: norms 896, biases of scores 576, row-wise biases 384
    inert={"k_head.bias": KEY_BIAS},
)

SQUEEZEBERT = encoder(
    "squeezebert",
    "SqueezeBert",
    "Model",
    {
        **TABLE,
        "embeddings": {"outputs": ["R"]},  # or else tokens that the ranks divide are cut for the first norm
        "**.query": "colwise",
        "**.key": "colwise",
        "**.value": "colwise",
        "**.post_attention.conv1d": "rowwise",
        "**.intermediate.conv1d": "colwise",
        "**.output.conv1d": "colwise_gather_output",
        **POOLER,
    },
    # The MLP's second layer is in groups, so nothing is summed, and what it adds to stays cut from attention on: a
    # reduce_scatter there, one number a row for each norm (mean, variance), and before the last MLP a gather, since
    # "colwise" takes its input whole.
    layers=(
        Layers("encoder.layers.0", 1, {"reduce_scatter": 1, "all_reduce": 3}),
        Layers("encoder.layers.1", 1, {"reduce_scatter": 1, "all_gather": 2}),
    ),
    outside={"all_reduce": 1, "all_gather": 1},  # the rows; the pooled vector
    different={"embedding_size": 64},
    cut=0.86,  # 4,992 of 38,016 numbers whole: positions and types 4,224, norms 640, row-wise biases 128
)

FNET = encoder(
    "fnet",
    "FNet",
    "Model",
    {**TABLE, **MLP, "embeddings.projection": "colwise_gather_output", **POOLER},
    inputs=token_ids(VOCABULARY),
    dims={"input_ids": {0: BATCH, 1: PLACES}},
    # The MLP's second layer: a Fourier transform mixes the tokens, without weights.
    layers=(Layers("encoder.layer.*", 2, {"all_reduce": 1}),),
    outside={"all_reduce": 1, "all_gather": 2},  # the rows; the projection before the layers, the pooled vector
    cut=0.88,  # 5,120 of 45,888 numbers whole: positions and types 4,352, norms 640, row-wise biases 128
    inert={},
)

MODERNBERT = encoder(
    "modernbert",
    "ModernBert",
    "Model",
    {
        "embeddings.tok_embeddings": "embedding_rowwise",
        "**.Wqkv": "colwise",
        "**.Wi": "colwise",
        "**.Wo": "rowwise",
    },
    path="layers.*",
    outside=ROWS,
    dims=ANY_LENGTH,
    different={
        "bos_token_id": 1,
        "eos_token_id": 2,
        "cls_token_id": 1,
        "sep_token_id": 2,
        "local_attention": 6,
        "global_attn_every_n_layers": 2,
    },
    cut=0.99,  # 320 of 77,632 numbers whole: norms
    inert={},
    tested="three kinds of heads as a dim; gate beside up",
)


CASES = [DEBERTA, CONVBERT, XLNET, FUNNEL, SQUEEZEBERT, FNET, MODERNBERT]
