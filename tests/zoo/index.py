"""All cases, by name."""

from __future__ import annotations

from tests.zoo import (
    decoders,
    encoder_decoders,
    encoders,
    recommenders,
    vision,
)

FAMILIES = (
    decoders,
    encoders,
    encoder_decoders,
    vision,
    recommenders,
)
CASES = {case.name: case for family in FAMILIES for case in family.CASES}
TESTED = [name for name, case in CASES.items() if case.tested]
