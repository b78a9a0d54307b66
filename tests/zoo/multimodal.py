"""Networks that read and see."""

from __future__ import annotations

from typing import Any

import torch
from torch.export import Dim

from tests.zoo.build import transformer
from tests.zoo.case import BATCH, Case, Layers, noise, token_ids
from tests.zoo.decoders import KEY_BIAS

VOCABULARY = 120
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8}
TEXT = {**SIZES, "vocab_size": VOCABULARY, "max_position_embeddings": 32, "pad_token_id": 0}
IMAGE = {**SIZES, "image_size": 32, "patch_size": 8}
ATTENTION = {"**.q_proj": "colwise", "**.k_proj": "colwise", "**.v_proj": "colwise", "**.out_proj": "rowwise"}
MLP = {"**.fc1": "colwise", "**.fc2": "rowwise"}


def _pixels_and_ids(batch: int, sequence: int) -> dict[str, torch.Tensor]:
    return {**token_ids(VOCABULARY - 1)(batch, sequence), **noise("pixel_values", batch, 3, 32, 32)}


def config(kind: str, **sizes: Any) -> Any:
    import transformers

    return getattr(transformers, f"{kind}Config")(**sizes)


PLACES = Dim("sequence", max=32)
DIMS = {"input_ids": {0: BATCH, 1: PLACES}, "pixel_values": {0: BATCH}}

CLIP = Case(
    name="clip",
    build=transformer(
        "CLIP",
        "Model",
        {},
        text_config={**TEXT, "bos_token_id": 1, "eos_token_id": 2},
        vision_config=IMAGE,
        projection_dim=48,
    ),
    inputs=_pixels_and_ids,
    dims=DIMS,
    plan={
        "**.token_embedding": "embedding_rowwise",
        "**.patch_embedding": "colwise_gather_output",
        **ATTENTION,
        **MLP,
        "*_projection": "colwise_gather_output",
    },
    layers=(
        Layers("text_model.encoder.layers.*", 2, {"all_reduce": 2}),
        Layers("vision_model.encoder.layers.*", 2, {"all_reduce": 2}),
    ),
    outside={"all_reduce": 1, "all_gather": 3},  # the rows; the patches, both projections
    cut=0.96,  # 5,121 of 147,073 numbers whole: positions and a token 3,200, norms 1,408, row-wise biases 512, a scale
    inert={"k_proj.bias": KEY_BIAS},
    flops=0.99,
)


def _llava() -> torch.nn.Module:
    return transformer(
        "Llava",
        "ForConditionalGeneration",
        {},
        use_cache=False,
        vision_config=config("CLIPVision", **IMAGE),
        text_config=config("Llama", **TEXT, num_key_value_heads=4, use_cache=False),
        image_token_index=VOCABULARY - 1,
        vision_feature_layer=-1,
    )()


def _llava_inputs(batch: int, sequence: int) -> dict[str, torch.Tensor]:
    made = _pixels_and_ids(batch, sequence)
    image = torch.full((batch, 16), VOCABULARY - 1)
    ids = torch.cat([made["input_ids"][:, :2], image, made["input_ids"][:, 2:]], 1)
    return {**made, "input_ids": ids}


LLAVA = Case(
    name="llava",
    build=_llava,
    inputs=_llava_inputs,
    static_because="torch.export makes the batch a constant where it splits the images' features",
    plan={
        "**.embed_tokens": "embedding_rowwise",
        "**.patch_embedding": "colwise_gather_output",
        **ATTENTION,
        "**.o_proj": "rowwise",
        **MLP,
        "**.linear_1": "colwise",
        "**.linear_2": "rowwise",
        "**.gate_proj": "colwise",
        "**.up_proj": "colwise",
        "**.down_proj": "rowwise",
        "lm_head": "colwise_gather_output",
    },
    layers=(
        Layers("model.vision_tower.encoder.layers.0", 1, {"all_reduce": 2}),
        Layers("model.vision_tower.encoder.layers.1", 1, {"all_reduce": 1}),  # of the MLP only what is taken is summed
        Layers("model.language_model.layers.*", 2, {"all_reduce": 2}),
    ),
    outside={"all_reduce": 3, "all_gather": 2},  # the rows, what is taken, the projector; the patches, the logits
    cut=0.98,  # 2,560 of 157,824 numbers whole: positions and a token 1,152, norms 1,088, row-wise biases 320
    inert={
        "k_proj.bias": KEY_BIAS,
        "post_layernorm.weight": "the layers' own output is taken",
        "post_layernorm.bias": "the same",
    },
    flops=0.99,
)


CASES = [CLIP, LLAVA]
