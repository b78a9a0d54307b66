"""What the search found, read off its variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from tpcompiler.ir.sharding import Sharding
from tpcompiler.solver.domain import Choice
from tpcompiler.solver.eliminate import eliminate
from tpcompiler.solver.problem import Problem, Style


@dataclass(frozen=True)
class Solution:
    """The choice of every op, what values with several users are turned into, every layer's style, and the cost."""

    choices: Mapping[fx.Node, Choice]
    settled: Mapping[fx.Node, Sharding]
    styles: Mapping[str, Style | None]
    seconds: float
    capped: int  # values that several ops use and that were given fewer shardings than these want


def solve(problem: Problem) -> Solution:
    """The cheapest choices, exactly.

    Raises:
        UnsupportedError: as `eliminate`.
    """
    seconds, found = eliminate(problem.tables)
    return Solution(
        {
            node: choices[found[problem.variables[node]] if node in problem.variables else 0]
            for node, choices in problem.choices.items()
        },
        {
            node: values.shardings[0 if values.variable is None else found[values.variable]]
            for node, values in problem.settled.items()
        },
        {name: layer.styles[found[layer.variable]] for name, layer in problem.layers.items()},
        seconds,
        problem.capped,
    )
