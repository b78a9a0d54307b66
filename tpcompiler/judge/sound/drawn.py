"""The numbers that replace dynamic sizes when a piece of a program is run."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tpcompiler._torch import example_sizes
from tpcompiler.judge.sound.unsound import DoesNotRun

LEAST, SPREAD = 24, 48  # few divisions bring 24 to 0
MULTIPLE = 24
# Ranges (least, spread) for regions with many elements, such as the logits of a large vocabulary; the second, of
# multiples of many numbers, is for regions that fail at sizes in the first.
SHORT, LONGER = (3, 8), (24, 24)


@dataclass
class DrawnSizes:
    """A number for each dynamic size, drawn at its first use.

    Nobody can derive the numbers from the files and write a program that is right for them alone. They differ from
    those of the previous trial. With `fits`, which meets facts about sizes that an export may have found, they are
    multiples of many numbers if possible, else as large as possible. With `scaled` they are those of the example times
    one number, as where one size may not exceed another.

    Attributes:
        least, spread: the smallest number to draw, and the width of the range.
        times: what the example's sizes are scaled by, drawn with the first.
    """

    before: Mapping[str, int] = field(default_factory=dict)
    fits: bool = False
    scaled: bool = False
    least: int = LEAST
    spread: int = SPREAD
    chosen: dict[str, int] = field(default_factory=dict)
    times: int = 0

    def of(self, symbol: Any, known: Any, example: int | None = None) -> int:
        """Return the number for a symbol, in the range that the program states."""
        name = str(symbol)
        if self.scaled and example and name not in self.chosen:
            fewest = -(-self.least // example)
            self.times = self.times or random.SystemRandom().randint(fewest, 2 * fewest)
            size = self.times * example
            self.chosen[name] = size if known is None or size in known else example
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

    def plain(self, value: Any, ranges: Mapping[Any, Any]) -> Any:
        """Return a size (or number, or truth value) with a number in its range for every symbol.

        Raises:
            DoesNotRun: it divides by a size that becomes 0.
        """
        if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return value
        expr, examples = value.node.expr, example_sizes(value.node.shape_env) if self.scaled else {}
        try:
            result = expr.xreplace(
                {symbol: self.of(symbol, ranges.get(symbol), examples.get(symbol)) for symbol in expr.free_symbols}
            )
        except ZeroDivisionError as error:
            raise DoesNotRun(None, f"there is no size {expr}") from error
        kinds: list[tuple[type, type]] = [(torch.SymInt, int), (torch.SymFloat, float), (torch.SymBool, bool)]
        return next(kind for symbolic, kind in kinds if isinstance(value, symbolic))(result)

    def __str__(self) -> str:
        return ", ".join(f"{name}={size}" for name, size in sorted(self.chosen.items()))
