"""Numbers for dynamic sizes, small ones, to run pieces of a program at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.export import ExportedProgram


def plain(value: Any, program: ExportedProgram) -> Any:
    """A size (or number, or truth) with a number in place of every symbol: its least, but 2 or 3 where that is less."""
    if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value
    expr = value.node.expr
    ranges = program.range_constraints
    chosen = {}
    for symbol in sorted(expr.free_symbols, key=str):
        known = ranges.get(symbol)
        least = int(known.lower) if known is not None else 0
        size = max(least, 2 + sum(map(ord, str(symbol))) % 2)
        chosen[symbol] = min(size, int(known.upper)) if known is not None and known.upper.is_Integer else size
    result = expr.xreplace(chosen)
    kinds: list[tuple[type, type]] = [(torch.SymInt, int), (torch.SymFloat, float), (torch.SymBool, bool)]
    return next(kind for symbolic, kind in kinds if isinstance(value, symbolic))(result)


def plain_shape(shape: Sequence[Any], program: ExportedProgram) -> list[int]:
    return [plain(size, program) for size in shape]
