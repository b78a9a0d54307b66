"""Every kind of damage: each of these modules registers its own."""

from __future__ import annotations

from tests.trust import calling, collectives, held, inside, moves, numbers
from tests.trust.damage import KINDS

MODULES = (calling, collectives, held, inside, moves, numbers)
__all__ = ["KINDS", "MODULES"]
