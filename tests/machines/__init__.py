"""The machines of tests: placements that do not depend on what a GPU costs today."""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent
WIRE = str(HERE / "wire.yaml")  # of all tests that name none
CALLS, SLOW, SMALL = (str(HERE / f"{name}.yaml") for name in ("calls", "slow", "small"))
