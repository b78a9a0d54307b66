"""The errors where a search finds no placements."""

from __future__ import annotations

import math
from collections.abc import Mapping

from tpcompiler.errors import ShardingError
from tpcompiler.solver.memory import Memory
from tpcompiler.solver.solution import Solution
from tpcompiler.solver.task import Task
from tpcompiler.terminal.printed import format_bytes


class TooLarge(ShardingError):
    """No placement that was found fits a rank. `least`: the memory of the smallest one; `searches`: by their kind."""

    least: Memory
    searches: Mapping[str, int]


def refuse_unplaced(task: Task, found: Solution) -> None:
    """Refuse a solution that places nothing, or more on a rank than it may hold.

    Raises:
        ShardingError: no placement suits all that is asked for; with the entries of the plan that conflict.
        TooLarge: none that was found fits a rank.
    """
    if math.isinf(found.seconds):
        raise ShardingError(
            "no placement of all values suits what is asked for",
            help="pin less in the plan and at the boundary, or use a degree that divides more of the sizes",
            asked_by=" and ".join(found.conflict),
        )
    if (least := found.too_large) is not None and (limit := task.limit) is not None:
        leaves = ", ".join(f"'{fqn}' {format_bytes(count)}" for fqn, count in least.largest)
        more = "" if task.is_searched else ", cut more layers"
        error = TooLarge(
            f"a rank would hold {least.text}; that is {format_bytes(least.total - limit)} more than the limit of "
            f"{format_bytes(limit)}. The largest weights there are {leaves}",
            help=f"use more ranks{more}, or a limit of at least {least.total} bytes",
        )
        error.least, error.searches = least, found.searches
        raise error
