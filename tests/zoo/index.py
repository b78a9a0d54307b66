"""All cases, by name."""

from __future__ import annotations

from tests.zoo import (
    audio,
    caches,
    convolutions,
    decoders,
    decoders_older,
    decoders_planned,
    decoders_unusual,
    diffusion,
    encoder_decoders,
    encoders,
    experts,
    forecasters,
    handwritten,
    multimodal,
    recommenders,
    state_space,
    unusual_encoders,
    vision,
    vision_transformers,
)

FAMILIES = (
    caches,
    decoders,
    decoders_older,
    decoders_planned,
    decoders_unusual,
    encoders,
    unusual_encoders,
    experts,
    encoder_decoders,
    vision,
    vision_transformers,
    convolutions,
    multimodal,
    audio,
    diffusion,
    forecasters,
    recommenders,
    state_space,
    handwritten,
)
CASES = {case.name: case for family in FAMILIES for case in family.CASES}
TESTED = [name for name, case in CASES.items() if case.tested]  # by the test suite; `make zoo` has all
