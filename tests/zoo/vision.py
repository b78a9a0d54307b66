"""Networks that see."""

from __future__ import annotations

import torch
from torch import nn
from torch.export import Dim

from tests.zoo.case import BATCH, Case, Layers, noise, randomise
from tests.zoo.decoders import KEY_BIAS


def pixels(batch: int, size: int) -> dict[str, torch.Tensor]:
    return noise("pixel_values", batch, 3, size, size)


def _vit() -> torch.nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=8,
        image_size=32,
        patch_size=8,
        num_labels=20,
    )
    return randomise(ViTForImageClassification(config))


VIT = Case(
    name="vit",
    build=_vit,
    inputs=pixels,
    tested="patches, a class token",
    dims={"pixel_values": {0: BATCH}},  # the table of positions fits one size of image
    example=(2, 32),
    others=((3, 32), (1, 32)),
    plan={
        "**.patch_embeddings.projection": "colwise_gather_output",
        "**.q_proj": "colwise",
        "**.k_proj": "colwise",
        "**.v_proj": "colwise",
        "**.o_proj": "rowwise",
        "**.fc1": "colwise",
        "**.fc2": "rowwise",
        "classifier": "colwise_gather_output",
    },
    # Attention's output projection, the MLP's second layer.
    layers=(Layers("vit.layers.*", 2, {"all_reduce": 2}),),
    outside={"all_gather": 2},  # the patches and the scores, as the plan says
    cut=0.97,  # all but 2,048 of 73,620 numbers: 1,088 of positions, 64 of the class token, norms and row-wise biases
    inert={"k_proj.bias": KEY_BIAS},
)


class Block(nn.Module):
    """Two convolutions with batch norm beside a short cut, as in ResNet-18."""

    def __init__(self, inside: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.short = nn.Identity() if inside == out else nn.Conv2d(inside, out, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.conv2(torch.relu(self.bn1(self.conv1(x))))
        return torch.relu(self.bn2(inner) + self.short(x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 7, 2, 3, bias=False)
        self.bn = nn.BatchNorm2d(16)
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.blocks = nn.Sequential(Block(16, 16, 1), Block(16, 24, 2))
        self.fc = nn.Linear(24, 20)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.pool(torch.relu(self.bn(self.conv(pixel_values)))))
        pooled: torch.Tensor = nn.functional.adaptive_avg_pool2d(x, 1)
        return self.fc(pooled.flatten(1))  # type: ignore[no-any-return]


HEIGHT, WIDTH = Dim("height", min=16), Dim("width", min=16)

RESNET = Case(
    name="resnet",
    build=lambda: randomise(ResNet()),
    inputs=pixels,
    tested="convolutions, statistics, pooling",
    dims={"pixel_values": {0: BATCH, 2: HEIGHT, 3: WIDTH}},
    example=(2, 32),
    others=((3, 48), (1, 20)),
    plan={
        # Channels stay cut through batch norm, relu and pooling; what is gathered then is a sixteenth of the image.
        "conv": "colwise",
        "pool": "gather",
        "blocks.*.conv1": "colwise",
        "blocks.*.conv2": "rowwise",
        "blocks.1.short": "rowwise",
        "fc": "colwise_gather_output",
    },
    # The second convolution; the short cut where the width changes. Batch norm lies between the two sums.
    layers=(Layers("blocks.0", 1, {"all_reduce": 1}), Layers("blocks.1", 1, {"all_reduce": 2})),
    outside={"all_gather": 2},  # the pooled stem, the scores
    cut=0.99,  # all but 104 of 16,700 numbers: the last norm of each block and the short cut's bias
)

CASES = [VIT, RESNET]
