"""Prices of the values of discrete variables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy


@dataclass
class Tables:
    """Variables, of which each takes one of `sizes[v]` values, and what values together cost (infinite: not allowed).

    `factors`: (variables, a table with one axis for each of them). `constant`: what all assignments cost.
    """

    constant: float = 0.0
    sizes: list[int] = field(default_factory=list)
    factors: list[tuple[tuple[int, ...], numpy.ndarray]] = field(default_factory=list)

    def variable(self, size: int) -> int:
        self.sizes.append(size)
        return len(self.sizes) - 1

    def price(self, variables: Sequence[int], table: numpy.ndarray) -> None:
        """Add a table, or a constant; of a variable that the table names twice, the diagonal."""
        if not variables:
            self.constant += float(table)
            return
        if len(set(variables)) < len(variables):
            assert len(variables) == 2
            variables, table = variables[:1], numpy.diagonal(table)
        assert table.shape == tuple(self.sizes[v] for v in variables)
        self.factors.append((tuple(variables), table))

    def count_cells(self) -> int:
        """Return the number of prices; layers alike have the very same tables."""
        return sum(table.size for table in {id(table): table for _, table in self.factors}.values())

    def cost(self, values: Sequence[int]) -> float:
        return self.constant + float(sum(table[tuple(values[v] for v in over)] for over, table in self.factors))
