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
VIT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "image_size": 32,
    "patch_size": 8,
}
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
        name="swinv2",
        build=transformer("Swinv2", "Model", SWIN),
        **IMAGES,
        plan={
            **PATCHES,
            "**.self.query": "colwise",
            "**.self.key": "colwise",
            "**.self.value": "colwise",
            "**.attention.output.dense": "rowwise",
            "**.intermediate.dense": "colwise",
            "**.blocks.*.output.dense": "rowwise",
            "**.downsample.reduction": "colwise_gather_output",
        },
        layers=(
            Layers("encoder.layers.0.blocks.*", 2, {"all_reduce": 2}),
            Layers("encoder.layers.1.blocks.*", 1, {"all_reduce": 2}),
        ),
        outside={"all_gather": 2},  # the patches, the merged patches
        # 13,632 of 61,464 numbers whole: 12,800 of networks that make the relative positions, norms 624, biases 192, 16
        cut=0.77,
        flops=0.85,  # those networks are run on every rank
    ),
    Case(
        name="beit",
        build=transformer("Beit", "ForImageClassification", VIT, **LABELS, use_relative_position_bias=True),
        **IMAGES,
        plan={**PATCHES, **ATTENTION, **MLP, **SCORES},
        # The second layer of the last block is summed when its mean over the patches is taken, which is less.
        layers=(
            Layers("beit.layers.0", 1, {"all_reduce": 2}),
            Layers("beit.layers.1", 1, {"all_reduce": 1}),
        ),
        outside={"all_reduce": 1, "all_gather": 2},  # that sum; the patches, the scores
        # 2,048 of 73,492 numbers whole: relative positions 832, norms 640, row-wise biases and scales 256 each, 64
        cut=0.97,
        flops=0.99,
    ),
    Case(
        name="deit",
        build=transformer("DeiT", "ForImageClassificationWithTeacher", VIT, **LABELS),
        **IMAGES,
        plan={**PATCHES, **ATTENTION, **MLP, "*_classifier": "colwise_gather_output"},
        layers=(Layers("deit.layers.*", 2, {"all_reduce": 2}),),
        outside={"all_gather": 3},  # the patches, the scores of class and teacher
        cut=0.97,  # 2,176 of 75,048 numbers whole: positions and tokens 1,280, norms 640, row-wise biases 256
        inert={"k_proj.bias": KEY_BIAS},
        flops=0.99,
    ),
    Case(
        name="dinov2",
        build=transformer("Dinov2", "ForImageClassification", VIT, **LABELS, mlp_ratio=2),
        **IMAGES,
        plan={**PATCHES, **ATTENTION, **MLP, **SCORES},
        layers=(Layers("dinov2.encoder.layer.*", 2, {"all_reduce": 2}),),
        outside={"all_gather": 2},  # the patches, the scores
        # 2,368 of 83,476 numbers whole: positions and tokens 1,216, norms 640, row-wise biases and scales 256 each
        cut=0.97,
        inert={"k_proj.bias": KEY_BIAS, "mask_token": "no patch is masked"},
        flops=0.99,
    ),
    Case(
        name="dpt",
        build=transformer(
            "DPT",
            "ForDepthEstimation",
            VIT,
            backbone_out_indices=[0, 1, 2, 3],
            num_hidden_layers=4,
            neck_hidden_sizes=[16, 24, 32, 48],
            fusion_hidden_size=24,
            reassemble_factors=[4, 2, 1, 0.5],
        ),
        **IMAGES,
        plan={
            **PATCHES,
            "**.attention.query": "colwise",
            "**.attention.key": "colwise",
            "**.attention.value": "colwise",
            "**.attention.output.dense": "rowwise",
            "**.intermediate.dense": "colwise",
            "**.layer.*.output.dense": "rowwise",
            "neck.reassemble_stage.readout_projects.*.0": "colwise_gather_output",
            "neck.reassemble_stage.layers.*.projection": "colwise",
            "neck.reassemble_stage.layers.2.projection": "colwise_gather_output",  # of the right size already
            "neck.reassemble_stage.layers.*.resize": "rowwise",
            "neck.convs.*": "colwise_gather_output",
            "**.residual_layer2.convolution1": "colwise",
            "**.residual_layer2.convolution2": "rowwise",
            **{f"**.layers.{n}.residual_layer1.convolution1": "colwise" for n in (1, 2, 3)},
            **{f"**.layers.{n}.residual_layer1.convolution2": "rowwise" for n in (1, 2, 3)},
            "**.fusion_stage.layers.*.projection": "colwise_gather_output",
            "head.head.0": "colwise_gather_output",
            "head.head.2": "colwise",
            "head.head.4": "rowwise",
        },
        layers=(Layers("dpt.encoder.layer.*", 4, {"all_reduce": 2}),),
        # Resizes 3, residual pairs 7, the depth; patches, read-outs 4, one unresized, convolutions 4, fusions 4, the head.
        outside={"all_reduce": 11, "all_gather": 15},
        # 13,489 of 316,829 numbers whole: what is not used 10,416, positions 1,152, norms 1,152, row-wise biases 769
        cut=0.95,
        inert={
            "key.bias": KEY_BIAS,
            "dpt.layernorm.weight": "the layers' own outputs are taken",
            "dpt.layernorm.bias": "the same",
            **{
                f"fusion_stage.layers.0.residual_layer1.convolution{n}.{kind}": "the first has nothing to be added to"
                for n in (1, 2)
                for kind in ("weight", "bias")
            },
        },
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
        name="pvt",
        build=transformer(
            "Pvt",
            "ForImageClassification",
            {},
            image_size=32,
            num_encoder_blocks=2,
            depths=[1, 1],
            sequence_reduction_ratios=[2, 1],
            hidden_sizes=[32, 64],
            patch_sizes=[4, 2],
            strides=[4, 2],
            num_attention_heads=[4, 8],
            mlp_ratios=[2, 2],
            **LABELS,
        ),
        **IMAGES,
        plan={
            "**.patch_embeddings.*.projection": "colwise_gather_output",
            "**.sequence_reduction": "colwise_gather_output",
            "**.self.query": "colwise",
            "**.self.key": "colwise",
            "**.self.value": "colwise",
            "**.attention.output.dense": "rowwise",
            "**.dense1": "colwise",
            "**.dense2": "rowwise",
            **SCORES,
        },
        # Attention's output projection and the MLP's second layer; the reduced sequence of the first stage.
        layers=(
            Layers("pvt.encoder.block.0.0", 1, {"all_reduce": 2, "all_gather": 1}),
            Layers("pvt.encoder.block.1.0", 1, {"all_reduce": 2}),
        ),
        outside={"all_gather": 3},  # the patches of both stages, the scores
        cut=0.93,  # 4,160 of 60,852 numbers whole: positions and a token 3,200, norms 768, row-wise biases 192
        inert={"key.bias": KEY_BIAS},
        flops=0.99,
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
