"""The cheapest assignment of discrete variables whose prices are tables over few of them."""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy

from tpcompiler.errors import UnsupportedError
from tpcompiler.terminal.progress import counted

if TYPE_CHECKING:  # scipy takes a second to import, and few searches need it
    from scipy.optimize import LinearConstraint


@dataclass
class Tables:
    """Variables, of which each takes one of `sizes[v]` values, and what values together cost (infinite: not allowed).

    `factors`: (variables, a table with one axis for each of them). `constant`: what all assignments cost. `order`: of
    elimination, if it is known.
    """

    constant: float = 0.0
    sizes: list[int] = field(default_factory=list)
    factors: list[tuple[tuple[int, ...], numpy.ndarray]] = field(default_factory=list)
    order: Sequence[tuple[int, list[int]]] = ()

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


MOST_CELLS = 1 << 25  # of one table: 256 MiB
TOO_SLOW = 1 << 20  # from which it is worth while to look for dead ends first
MOST_JOINT_CELLS = 1 << 23  # over several axes at once, which may take turns instead: elimination takes a second


def minimize(tables: Tables) -> tuple[float, list[int]]:
    """Return the least cost, and a value of every variable that gives it.

    By bucket elimination; where its tables grow too large, without the values that are dead ends; and where they still
    do, as in unrolled loops, as an integer program.

    Raises:
        UnsupportedError: as `solve_integer_program`.
    """
    try:
        return eliminate(tables, TOO_SLOW)
    except UnsupportedError:
        kept = [*map(tuple, find_live_values(tables))]
        made: dict[Any, numpy.ndarray] = {}  # layers alike keep the very same tables
        live = Tables(tables.constant, [len(own) for own in kept])
        for variables, table in tables.factors:
            own = tuple(kept[v] for v in variables)
            known = id(table), own
            if known not in made:
                made[known] = table[numpy.ix_(*own)].squeeze()  # an array has no more than 64 dims
            live.price([v for v in variables if len(kept[v]) > 1], made[known])
        try:
            total, values = eliminate(live, MOST_CELLS)
        except UnsupportedError:
            total, values = solve_integer_program(live)
        return total, [own[value] for own, value in zip(kept, values, strict=True)]


def find_live_values(tables: Tables) -> list[list[int]]:
    """The values of each variable that no other one beats, whatever the other variables are; of equals the first.

    Dead-end elimination (Goldstein, "Efficient rotamer elimination applied to protein side-chains", 1994), until
    nothing is left to drop. Variables between the very same tables are looked into once.
    """
    kept = [tuple(range(size)) for size in tables.sizes]
    known: dict[Any, tuple[int, ...]] = {}
    of: list[list[int]] = [[] for _ in tables.sizes]
    for number, (variables, _) in enumerate(tables.factors):
        for v in variables:
            of[v].append(number)
    open_ = dict.fromkeys(range(len(kept)))
    while open_:
        v = next(iter(open_))
        del open_[v]
        factors = [tables.factors[number] for number in of[v]]
        alike = kept[v], tuple((u == v or kept[u], id(table)) for us, table in factors for u in us)
        if alike not in known:
            known[alike] = _live(v, kept, factors)
        live = known[alike]
        if len(live) < len(kept[v]):
            kept[v] = live
            open_ |= dict.fromkeys(u for number in of[v] for u in tables.factors[number][0] if u != v)
    return [*map(list, kept)]


def _live(
    v: int, kept: Sequence[Sequence[int]], factors: Sequence[tuple[tuple[int, ...], numpy.ndarray]]
) -> tuple[int, ...]:
    own = list(kept[v])
    more = numpy.zeros((len(own), len(own)))  # what a row costs more than a column at least
    with numpy.errstate(invalid="ignore"):
        for variables, table in factors if len(own) > 1 else ():
            part = numpy.moveaxis(table[numpy.ix_(*(kept[u] for u in variables))], variables.index(v), 0)
            flat = part.reshape(len(own), -1)
            apart = flat[:, None] - flat[None]
            more += numpy.where(numpy.isnan(apart), numpy.inf, apart).min(
                -1
            )  # where neither is allowed, neither is worse
    more[numpy.isnan(more)] = -numpy.inf
    left = list(range(len(own)))
    for row in reversed(range(len(own))):
        if any(more[row, other] > 0 or (more[row, other] == 0 and other < row) for other in left if other != row):
            left.remove(row)
    return tuple(own[at] for at in left)


def eliminate(tables: Tables, most: int = MOST_CELLS) -> tuple[float, list[int]]:
    """The least cost, and a value of every variable that gives it.

    Exact: bucket elimination (Dechter, "Bucket elimination: a unifying framework for reasoning", 1999), the variable
    with the smallest table next. Of values that cost the same the first one is taken. Layers alike have the very same
    tables, whose sums are found once.

    Raises:
        UnsupportedError: a table with more cells than `most`.
    """
    order = tables.order or find_order(tables.sizes, [over for over, _ in tables.factors], most)
    of: list[set[int]] = [set() for _ in tables.sizes]  # the factors of each variable
    factors = dict(enumerate(tables.factors))
    for number, (variables, _) in factors.items():
        for v in variables:
            of[v].add(number)
    steps, total, fresh = [], tables.constant, len(factors)
    known: dict[Any, tuple[numpy.ndarray, numpy.ndarray, Any]] = {}
    for v, others in counted(order, "eliminating choices", "variables"):
        taken = [factors.pop(number) for number in sorted(of[v])]
        place = {u: at for at, u in enumerate((*others, v))}
        parts = [(tuple(map(place.__getitem__, variables)), table) for variables, table in taken]
        alike = tuple((axes, id(table)) for axes, table in parts)
        if alike not in known:
            both = _sum(parts, [tables.sizes[u] for u in place])
            known[alike] = both.argmin(-1), both.min(-1), parts  # which keeps the tables, and so their ids
        best, made, _ = known[alike]
        for number in list(of[v]):
            for u in others:
                of[u].discard(number)
        steps.append((v, others, best))
        if others:
            factors[fresh] = (tuple(others), made)
            for u in others:
                of[u].add(fresh)
            fresh += 1
        else:
            total += float(made)
    values = [0] * len(tables.sizes)
    for v, others, best in reversed(steps):
        values[v] = int(best[tuple(values[u] for u in others)])
    return total, values


def find_order(sizes: Sequence[int], scopes: Iterable[tuple[int, ...]], most: int) -> list[tuple[int, list[int]]]:
    """Every variable once, that with the smallest table next, and the others in its table: sizes alone decide.

    Args:
        scopes: the variables of each table.

    Raises:
        UnsupportedError: a table would have more cells than `most`.
    """
    near = [{v} for v in range(len(sizes))]  # the variables in the factors of each
    for variables in scopes:
        for v in variables:
            near[v].update(variables)
    queue = [(_cells(near[v], sizes), v) for v in range(len(sizes))]
    heapq.heapify(queue)
    order, left = list[tuple[int, list[int]]](), set(range(len(sizes)))
    while queue:
        cells, v = heapq.heappop(queue)
        if v not in left:
            continue
        if cells != (now := _cells(near[v], sizes)):
            heapq.heappush(queue, (now, v))
            continue
        if cells > most:
            raise UnsupportedError(f"the choices depend on each other in tables of {cells:,} cells", help="give a plan")
        left.remove(v)
        others = sorted(near[v] - {v})
        order.append((v, others))
        for u in others:
            near[u] = (near[u] | near[v]) - {v}
            heapq.heappush(queue, (_cells(near[u], sizes), u))
    return order


def _cells(variables: Collection[int], sizes: Sequence[int]) -> int:
    """Return the size of a table over these variables."""
    return math.prod(map(sizes.__getitem__, variables))


def _sum(parts: Sequence[tuple[tuple[int, ...], numpy.ndarray]], sizes: Sequence[int]) -> numpy.ndarray:
    """The sum of tables over variables of these sizes; each says which of them its axes are."""
    total = numpy.zeros([1] * len(sizes))
    for axes, table in parts:
        shape = [size if at in axes else 1 for at, size in enumerate(sizes)]
        total = total + table.transpose(sorted(range(len(axes)), key=axes.__getitem__)).reshape(shape)
    return total


MOST_INTEGER_CELLS = 1 << 17  # of all tables together
MOST_NODES = 1000  # of branch and bound
LARGEST = 1e6  # the largest cost that HiGHS sees, whose tolerances are absolute
INFEASIBLE = 2  # a status of scipy's


def solve_integer_program(tables: Tables) -> tuple[float, list[int]]:
    """Return the least cost, infinite if nothing is allowed, and a value of every variable that gives it.

    HiGHS minimises over the local polytope (Wainwright and Jordan, "Graphical models, exponential families, and
    variational inference", 2008, section 4.1) with whole numbers: an indicator of each value of a variable and of each
    cell of a table; those of a table's cells with one value sum up to the indicator of that value.

    Raises:
        UnsupportedError: more than `MOST_INTEGER_CELLS` cells, or no proof after `MOST_NODES` nodes.
    """
    from scipy.optimize import Bounds, milp

    cells = sum(table.size for _, table in tables.factors)
    if cells > MOST_INTEGER_CELLS:
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
