"""Decoders with Hugging Face's static caches, as its own export helpers wrap them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from tests.zoo.case import SEQUENCE, Case, Layers, hugging_face, randomise, token_ids
from tests.zoo.decoders import OUTSIDE, SIZES, VOCABULARY

BATCH_SIZE, ROOM = 2, 16
Inputs = dict[str, torch.Tensor]


def _chunk(first: int, length: int) -> Inputs:
    positions = torch.arange(first, first + length)
    return {**token_ids(VOCABULARY)(BATCH_SIZE, length), "cache_position": positions}


def cached(name: str, family: str, helper: str, **different: Any) -> Case:
    """A case of a model of Llama's layout, called on one cache: two chunks of a prompt, and then a third."""

    def model() -> torch.nn.Module:
        import transformers

        config = getattr(transformers, f"{family}Config")(**{**SIZES, "use_cache": True, **different})
        made = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config)
        made.generation_config.cache_implementation = "static"
        return randomise(made)

    def build() -> torch.nn.Module:
        from transformers.integrations import executorch

        wrapped: torch.nn.Module = getattr(executorch, helper)(model(), BATCH_SIZE, ROOM)
        return wrapped

    def plan(wrapped: torch.nn.Module) -> Mapping[str, object]:
        asked = {**hugging_face(model()), "model.embed_tokens": "embedding_rowwise"}
        return {f"model.{pattern}": style for pattern, style in asked.items()}

    return Case(
        name=name,
        build=build,
        inputs=lambda batch, size: _chunk(0, size),
        then=lambda batch, size: [_chunk(size, size), _chunk(2 * size, size)],
        dims={"input_ids": {1: SEQUENCE}, "cache_position": {0: SEQUENCE}},
        example=(BATCH_SIZE, 4),
        others=((BATCH_SIZE, 1), (BATCH_SIZE, 5)),
        plan=plan,
        # As without a cache: it is cut by heads, as what is written to it is.
        layers=(Layers("model.model.layers.*", 2, {"all_reduce": 2}),),
        outside=OUTSIDE,
        cut=0.99,  # all but the norms' 64 numbers each
        flops=0.99,
        strict=True,
    )


LLAMA = cached("llama_cached", "Llama", "TorchExportableModuleWithStaticCache")
LLAMA = replace(LLAMA, tested="buffers that are written, several calls")
# Layers with a window and without: their masks differ.
GEMMA3 = cached("gemma3_cached", "Gemma3Text", "TorchExportableModuleWithHybridCache", head_dim=12, sliding_window=8)
CASES = [LLAMA, GEMMA3]
