"""The numbers that stand for dynamic sizes where a piece of a program is run."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LEAST, SPREAD = 24, 48  # few divisions bring 24 to 0
MULTIPLE = 24
# Ranges (least, spread) for regions of many elements, such as the logits of a large vocabulary: the second, of
# multiples of many numbers, where the region does not run at sizes in the first.
SHORT, LONGER = (3, 8), (24, 24)


@dataclass
class Sizes:
    """Which number stands for each dynamic size, drawn when it is first asked for.

    Nobody can know them from the files, and so make a program that is right for these alone. They are others than those
    of the trial before. Where they are to fit what an export may have found of sizes, they are multiples of many
    numbers where that can be, else as large as can be.

    Attributes:
        least, spread: the smallest number to draw, and how much larger one may be.
    """

    before: Mapping[str, int] = field(default_factory=dict)
    fits: bool = False
    least: int = LEAST
    spread: int = SPREAD
    chosen: dict[str, int] = field(default_factory=dict)

    def of(self, symbol: Any, known: Any) -> int:
        """For a symbol, in the range that the program knows for it."""
        name = str(symbol)
        if name not in self.chosen:
            least = int(known.lower) if known is not None else 0
            low = max(least, self.least)
            high = low + self.spread
            if known is not None and known.upper.is_Integer:
                high = min(high, int(known.upper))
                low = max(least, min(low, high - self.spread // 2))
            others = [size for size in range(low, high + 1) if size != self.before.get(name)]
            fitting = [size for size in others if self.fits and size % MULTIPLE == 0]
            largest = others[-1:] if self.fits else []
            self.chosen[name] = random.SystemRandom().choice(fitting or largest or others or [low])
        return self.chosen[name]

    def __str__(self) -> str:
        return ", ".join(f"{name}={size}" for name, size in sorted(self.chosen.items()))
