"""Attention over images."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.build import transformer
from tests.zoo.case import BATCH, Case, Layers
from tests.zoo.decoders import KEY_BIAS
from tests.zoo.vision import pixels

ATTENTION = {
    "**.q_proj": "colwise",
    "**.k_proj": "colwise",
    "**.v_proj": "colwise",
    "**.o_proj": "rowwise",
}
MLP = {"**.fc1": "colwise", "**.fc2": "rowwise"}
PATCHES = {"**.patch_embeddings.projection": "colwise_gather_output"}
SCORES = {"classifier": "colwise_gather_output"}
SWIN = {"image_size": 32, "patch_size": 4, "embed_dim": 24, "depths": [2, 1], "num_heads": [4, 8], "window_size": 4}
LABELS = {"num_labels": 20}
IMAGES: dict[str, Any] = {
    "inputs": pixels,
    "dims": {"pixel_values": {0: BATCH}},
    "example": (2, 32),
    "others": ((3, 32), (1, 32)),
}


def _detr() -> torch.nn.Module:
    from transformers import ResNetConfig

    backbone = ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    sizes = {"encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "encoder_attention_heads": 8, "decoder_attention_heads": 8}
    model = transformer(
        "Detr",
        "ForObjectDetection",
        sizes,
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=backbone,
        d_model=64,
        encoder_layers=1,
        decoder_layers=2,
        num_queries=7,
        num_labels=7,
    )()
    with torch.no_grad():
        model.get_parameter("model.query_position_embeddings.weight").mul_(8)  # so that queries differ in what they see
    return model


CASES = [
    Case(
        name="swin",
        tested="windows that are shifted",
        build=transformer("Swin", "ForImageClassification", SWIN, **LABELS),
        **IMAGES,
        plan={**PATCHES, **ATTENTION, **MLP, "**.downsample.reduction": "colwise_gather_output", **SCORES},
        layers=(
            Layers("swin.encoder.layers.0.blocks.*", 2, {"all_reduce": 2}),
            Layers("swin.encoder.layers.1.blocks.*", 1, {"all_reduce": 2}),
        ),
        outside={"all_gather": 3},  # the patches, the merged patches, the scores
        cut=0.96,  # 1,696 of 50,604 numbers whole: relative positions 784, norms 720, row-wise biases 192
        inert={"k_proj.bias": KEY_BIAS},
        flops=0.99,
    ),
    Case(
        name="sam_vision",
        build=transformer(
            "SamVision",
            "Model",
            {},
            hidden_size=64,
            output_channels=32,
            num_hidden_layers=2,
            num_attention_heads=8,
            image_size=32,
            patch_size=4,
            mlp_dim=96,
            window_size=3,
            global_attn_indexes=[1],
        ),
        **IMAGES,
        plan={
            "**.patch_embed.projection": "colwise_gather_output",
            "**.attn.qkv": "colwise",
            "**.proj": "rowwise",
            "**.lin1": "colwise",
            "**.lin2": "rowwise",
            "**.neck.conv1": "colwise_gather_output",
            "**.neck.conv2": "colwise_gather_output",
        },
        layers=(Layers("vision_encoder.layers.*", 2, {"all_reduce": 2}),),
        # The patches, the two convolutions behind the layers, each before a norm over channels.
        outside={"all_gather": 3},
        cut=0.93,  # 5,312 of 77,632 numbers whole: positions 4,416, norms 640, row-wise biases 256
        flops=0.99,
        tested="three kinds of heads as a dim, taken apart one by one",
    ),
    Case(
        name="detr",
        build=_detr,
        **IMAGES,
        plan={
            "**.embedder.convolution": "colwise_gather_output",
            "**.shortcut.convolution": "rowwise",
            "**.layer.0.convolution": "colwise",
            "**.layer.1.convolution": "rowwise",
            "model.input_projection": "colwise_gather_output",
            **ATTENTION,
            **MLP,
            "class_labels_classifier": "colwise_gather_output",
            "bbox_predictor.layers.0": "colwise",
            "bbox_predictor.layers.1": "rowwise",
        },
        # Self-attention and MLP, and cross-attention besides.
        layers=(
            Layers("model.encoder.layers.*", 1, {"all_reduce": 2}),
            Layers("model.decoder.layers.*", 2, {"all_reduce": 3}),
        ),
        # Two basic blocks, one with its short cut, the boxes' second layer; the stem, the features, the classes.
        outside={"all_reduce": 3, "all_gather": 3},
        # 2,436 of 154,652 numbers whole: norms 1,152, row-wise biases 580, queries 448, the last layer of boxes 256
        cut=0.98,
        inert={
            "k_proj.bias": KEY_BIAS,
            **{
                f"decoder.layers.0.self_attn.{name}": "all queries begin as zeros, so their values are one"
                for name in ("q_proj.weight", "q_proj.bias", "k_proj.weight", "v_proj.weight")
            },
        },
        flops=0.99,
    ),
]
