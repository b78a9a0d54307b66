"""Networks that continue series of numbers."""

from __future__ import annotations

import torch

from tests.zoo.build import transformer
from tests.zoo.case import BATCH, Case, Layers, noise
from tests.zoo.decoders import KEY_BIAS


def _past(batch: int, size: int) -> dict[str, torch.Tensor]:
    return noise("past_values", batch, size, 3)


SERIES = {"dims": {"past_values": {0: BATCH}}, "inputs": _past, "example": (2, 24), "others": ((3, 24), (1, 24))}

PATCHTST = Case(
    name="patchtst",
    build=transformer(
        "PatchTST",
        "ForPrediction",
        {},
        num_input_channels=3,
        context_length=24,
        patch_length=4,
        patch_stride=4,
        num_hidden_layers=2,
        d_model=64,
        num_attention_heads=8,
        ffn_dim=96,
        prediction_length=6,
    ),
    **SERIES,
    plan={
        "**.input_embedding": "colwise_gather_output",
        "**.q_proj": "colwise",
        "**.k_proj": "colwise",
        "**.v_proj": "colwise",
        "**.out_proj": "rowwise",
        "**.ff.0": "colwise",
        "**.ff.3": "rowwise",
    },
    # Attention's output projection, the MLP's second layer; of the last one the forecast is summed, which is smaller.
    layers=(
        Layers("model.encoder.layers.0", 1, {"all_reduce": 2}),
        Layers("model.encoder.layers.1", 1, {"all_reduce": 1}),
    ),
    outside={"all_gather": 1, "all_reduce": 1},  # the patches; the forecast
    cut=0.97,  # 1,542 of 59,782 numbers whole: positions 384, the head 390, norms 512, row-wise biases 256
    inert={"k_proj.bias": KEY_BIAS},
    flops=0.99,
)


CASES = [PATCHTST]
