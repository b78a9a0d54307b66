"""The cheapest assignment of discrete variables, by integer programming."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy

from tpcompiler.errors import UnsupportedError
from tpcompiler.solver.tables import Tables

if TYPE_CHECKING:  # scipy takes a second to import, and few searches need it
    from scipy.optimize import LinearConstraint

MOST_CELLS = 1 << 17  # of all tables together
MOST_NODES = 1000  # of branch and bound
LARGEST = 1e6  # the largest cost that HiGHS sees, whose tolerances are absolute
INFEASIBLE = 2  # a status of scipy's


def solve_integer_program(tables: Tables) -> tuple[float, list[int]]:
    """Return the least cost, infinite if nothing is allowed, and a value of every variable that gives it.

    HiGHS minimises over the local polytope (Wainwright and Jordan, "Graphical models, exponential families, and
    variational inference", 2008, section 4.1) with whole numbers: an indicator of each value of a variable and of each
    cell of a table; those of a table's cells with one value sum up to the indicator of that value.

    Raises:
        UnsupportedError: more than `MOST_CELLS` cells, or no proof after `MOST_NODES` nodes.
    """
    from scipy.optimize import Bounds, milp

    cells = sum(table.size for _, table in tables.factors)
    if cells > MOST_CELLS:
        raise UnsupportedError(f"the choices depend on each other in {cells:,} cells", help="give a plan")
    first = numpy.cumsum([0, *tables.sizes])
    starts = first[-1] + numpy.cumsum([0, *(table.size for _, table in tables.factors)])
    costs = numpy.concatenate([numpy.zeros(first[-1]), *(table.reshape(-1) for _, table in tables.factors)])
    allowed = numpy.isfinite(costs)
    costs[~allowed] = 0.0
    rows = [(range(first[v], first[v + 1]), None) for v in range(len(tables.sizes))]
    for start, (variables, table) in zip(starts, tables.factors, strict=False):
        numbers = start + numpy.arange(table.size).reshape(table.shape)
        for axis, v in enumerate(variables):
            rows += [(numbers.take(at, axis).reshape(-1), first[v] + at) for at in range(table.shape[axis])]
    found = milp(
        costs * (LARGEST / max(numpy.abs(costs).max(initial=0.0), 1.0)),
        integrality=numpy.arange(len(costs)) < first[-1],
        bounds=Bounds(0.0, allowed.astype(float)),
        constraints=_equal(rows, len(costs)),
        options={"node_limit": MOST_NODES, "mip_rel_gap": 0.0},
    )
    if found.status == INFEASIBLE:
        return math.inf, [0] * len(tables.sizes)
    if not found.success:
        raise UnsupportedError(f"the choices are not solved in {MOST_NODES:,} nodes", help="give a plan")
    values = [int(found.x[first[v] : first[v + 1]].argmax()) for v in range(len(tables.sizes))]
    return tables.cost(values), values


def _equal(rows: Iterable[tuple[Iterable[int], int | None]], columns: int) -> LinearConstraint:
    """Return the constraint that the columns of each row sum up to another column, or to 1."""
    at, entries, sums = list[tuple[int, int]](), list[float](), list[float]()
    for number, (ones, other) in enumerate(rows):
        at += [(number, int(column)) for column in ones]
        entries += [1.0] * (len(at) - len(entries))
        if other is not None:
            at.append((number, int(other)))
            entries.append(-1.0)
        sums.append(float(other is None))
    from scipy.optimize import LinearConstraint
    from scipy.sparse import csr_array

    return LinearConstraint(csr_array((entries, tuple(zip(*at, strict=True))), (len(sums), columns)), sums, sums)
