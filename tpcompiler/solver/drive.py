"""The driver of the search: solve once, then try each retry in one list."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from tpcompiler.solver.retries import (
    cut_shared_heads,
    find_conflict,
    fit_memory,
    ignore_plan,
    take_forms,
    write_simpler_ops,
)
from tpcompiler.solver.search import search
from tpcompiler.solver.solution import Solution
from tpcompiler.solver.task import Task


class Retry(NamedTuple):
    """A way to improve on a solution.

    `searches`: the words for its searches in the report. `improve`: takes the task, the best solution until now, and
    a function that solves another task with the retries before this one; returns a solution that is no worse.
    `is_needed`: also where enough has been priced (`Task.ends`).
    """

    searches: str
    improve: Callable[[Task, Solution, Callable[[Task], Solution]], Solution]
    is_needed: bool = False


RETRIES = (
    Retry("with heads that ranks share", cut_shared_heads),
    Retry("with simpler ops", write_simpler_ops),
    Retry("without the plan", ignore_plan),
    Retry("to fit the memory", fit_memory, is_needed=True),
    Retry("in other forms", take_forms),
    Retry("to find a conflict", find_conflict, is_needed=True),
)
PLACING = RETRIES[:3]  # the cheapest placements, whatever a rank holds


def solve(task: Task, retries: Sequence[Retry] = RETRIES) -> Solution:
    """Find the cheapest placements of all values of programs that share their leaves.

    Returns:
        A solution with infinite seconds where the task has none (`refuse_unplaced` raises the error).

    Raises:
        UnsupportedError: as `search`.
    """
    before, best = task.tally.searches, search(task)
    counts = {"as planned": 1}
    for at, retry in enumerate(retries):
        is_needed = retry.is_needed or best.lacks_memory or math.isinf(best.seconds)
        if not is_needed and task.ends():
            continue
        done = task.tally.searches
        best = retry.improve(task, best, partial(solve, retries=retries[:at]))
        counts[retry.searches] = task.tally.searches - done
    assert sum(counts.values()) == task.tally.searches - before
    return replace(best, searches={words: count for words, count in counts.items() if count})
