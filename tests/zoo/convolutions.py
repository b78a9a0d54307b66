"""Convolutional networks: in groups, depth-wise, squeezed and excited."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.zoo.build import transformer
from tests.zoo.case import BATCH, Case, Layers
from tests.zoo.vision import pixels

IMAGES: dict[str, Any] = {
    "inputs": pixels,
    "dims": {"pixel_values": {0: BATCH}},
    "example": (2, 32),
    "others": ((3, 32), (1, 32)),
}


def louder(build: Callable[[], torch.nn.Module], by: float) -> Callable[[], torch.nn.Module]:
    """With stronger convolutions, so that the first of many layers still matters behind all activations."""

    def made() -> torch.nn.Module:
        model = build()
        with torch.no_grad():
            for module in model.modules():
                if isinstance(module, torch.nn.Conv2d):
                    module.weight.mul_(by)
        return model

    return made


CONVNEXT = Case(
    name="convnext",
    build=transformer(
        "ConvNext", "ForImageClassification", {}, hidden_sizes=[16, 32], depths=[1, 2], num_stages=2, num_labels=20
    ),
    **IMAGES,
    # A norm over all channels follows the depth-wise convolution at once, so that is whole.
    plan={
        "convnext.embeddings.patch_embeddings": "colwise_gather_output",
        "**.downsampling_layer.1": "colwise_gather_output",
        "**.pwconv1": "colwise",
        "**.pwconv2": "rowwise",
        "classifier": "colwise_gather_output",
    },
    # The second point-wise layer.
    layers=(
        Layers("convnext.encoder.stages.0.layers.*", 1, {"all_reduce": 1}),
        Layers("convnext.encoder.stages.1.layers.0", 1, {"all_reduce": 1}),
    ),
    # The last block's sum is taken of the mean over the image, which is less; the patches, the halved image, the scores.
    outside={"all_reduce": 1, "all_gather": 3},
    cut=0.83,  # 4,448 of 26,724 numbers whole: depth-wise 4,000, norms 288, scales and row-wise biases 80 each
    flops=0.82,
)


REGNET = Case(
    name="regnet",
    tested="convolutions in groups, squeezed channels",
    build=transformer(
        "RegNet",
        "ForImageClassification",
        {},
        embedding_size=16,
        hidden_sizes=[32, 64],
        depths=[1, 2],
        groups_width=8,
        num_labels=20,
        layer_type="y",
    ),
    **IMAGES,
    plan={
        "**.embedder.convolution": "colwise_gather_output",
        "**.shortcut.convolution": "rowwise",
        "**.layer.0.convolution": "colwise",
        "**.layer.1.convolution": "colwise",
        "**.attention.0": "rowwise",
        "**.attention.2": "colwise",
        "**.layer.3.convolution": "rowwise",
        "classifier.1": "colwise_gather_output",
    },
    # The squeezed channels, the last convolution, and the short cut where the width changes. Of the first block the last
    # two are added in parts.
    layers=(
        Layers("regnet.encoder.stages.0.layers.0", 1, {"all_reduce": 1, "reduce_scatter": 2, "all_gather": 1}),
        Layers("regnet.encoder.stages.1.layers.0", 1, {"all_reduce": 3}),
        Layers("regnet.encoder.stages.1.layers.1", 1, {"all_reduce": 2}),
    ),
    outside={"all_gather": 2},  # the stem, the scores
    cut=0.98,  # 572 of 36,384 numbers whole: norms 544, row-wise biases 28
    flops=0.99,
)

EFFICIENTNET = Case(
    name="efficientnet",
    build=louder(
        transformer(
            "EfficientNet",
            "ForImageClassification",
            {},
            width_coefficient=0.25,
            depth_coefficient=0.2,
            image_size=32,
            hidden_dim=320,
            num_labels=20,
        ),
        1.7,
    ),
    **IMAGES,
    plan={
        "efficientnet.embeddings.convolution": "colwise_gather_output",
        "**.expand_conv": "colwise",
        "**.depthwise_conv.depthwise_conv": "colwise",
        "**.squeeze_excite.reduce": "rowwise",
        "**.squeeze_excite.expand": "colwise",
        "**.project_conv": "rowwise",
        "**.top_conv": "colwise",
        "classifier": "rowwise",
    },
    # The squeezed channels, the convolution that narrows again.
    layers=(Layers("efficientnet.encoder.blocks.*", 7, {"all_reduce": 2}),),
    outside={"all_reduce": 1},  # the scores; the stem is used as it is cut
    cut=0.99,  # 504 of 130,032 numbers whole: norms and row-wise biases
    flops=0.99,
)


CASES = [CONVNEXT, REGNET, EFFICIENTNET]
