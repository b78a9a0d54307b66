"""All cases, by name."""

from __future__ import annotations

from tests.zoo import (
    caches,
    decoders,
    decoders_older,
    decoders_planned,
    decoders_unusual,
    encoder_decoders,
    encoders,
    experts,
    recommenders,
    state_space,
    vision,
)

FAMILIES = (
    caches,
    decoders,
    decoders_older,
    decoders_planned,
    decoders_unusual,
    encoders,
    experts,
    encoder_decoders,
    vision,
    recommenders,
    state_space,
)
CASES = {case.name: case for family in FAMILIES for case in family.CASES}
TESTED = [name for name, case in CASES.items() if case.tested]  # by the test suite; `make zoo` has all
