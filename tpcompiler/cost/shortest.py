"""A shortest path from one sharding to another; the caller says which steps lead on from each."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tpcompiler.ir.sharding import Sharding

if TYPE_CHECKING:
    from tpcompiler.cost.path import Step

UNIT = 1e-15  # seconds: smaller differences between paths are ties

Timed = tuple["Step", float]  # a step, and its seconds


def find_shortest(
    source: Sharding,
    target: Sharding,
    find_steps: Callable[[Sharding], Sequence[Timed]],
    find_rest: Callable[[Sharding], float],
) -> list[Step]:
    """Return the fastest steps; ties go to the path with the fewest wire bytes, then to the one with the fewest steps.

    The least time is found first, by A* (Hart, Nilsson and Raphael, 1968). Dijkstra's order then breaks the ties, and
    leaves out what cannot be on a path of that time.

    Args:
        find_rest: seconds that the rest of a path from a sharding takes at least; no step takes less than it saves.
    """
    if not find_rest(source):
        return _reach(source, target, find_steps, find_rest, math.inf)[1]
    least, _ = _reach(source, target, find_steps, find_rest, None)
    return _reach(source, target, find_steps, find_rest, least + 1)[1]  # a sum may be rounded up


def _reach(
    source: Sharding,
    target: Sharding,
    find_steps: Callable[[Sharding], Sequence[Timed]],
    find_rest: Callable[[Sharding], float],
    most: float | None,
) -> tuple[int, list[Step]]:
    """Return the time of a shortest path in units, and its steps.

    `most`: units that no path of interest takes more than; without it, the order is that of A*.
    """
    nearest, seconds_to = {source: (0, 0, 0)}, {source: 0.0}  # (time, wire bytes, steps), and seconds
    reached: dict[Sharding, Step] = {}
    serial = itertools.count()  # of equally distant states the target goes first, then the earliest one
    open_ = [((0, 0, 0), True, next(serial), source)]
    while (state := heapq.heappop(open_)[-1]) != target:
        for step, more in find_steps(state):
            seconds, (_, sent, count) = seconds_to[state] + more, nearest[state]
            far = round(seconds / UNIT), sent + step.wire_bytes, count + 1
            if step.target in nearest and far >= nearest[step.target]:
                continue
            whole = far[0] + math.floor(find_rest(step.target) / UNIT)
            if most is None or whole <= most:
                nearest[step.target], seconds_to[step.target], reached[step.target] = far, seconds, step
                order = (whole, *far[1:]) if most is None else far
                heapq.heappush(open_, (order, step.target != target, next(serial), step.target))
    path = [reached[target]]
    while path[-1].source != source:
        path.append(reached[path[-1].source])
    return nearest[target][0], path[::-1]
