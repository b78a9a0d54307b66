"""The least cost is the least: against every assignment, and against an integer program."""

from __future__ import annotations

import itertools
import math

import networkx
import numpy
import pytest

from tpcompiler.errors import UnsupportedError
from tpcompiler.solver import minimize as solver
from tpcompiler.solver.minimize import Tables, eliminate, solve_integer_program


def random_tables(seed: int, most: int, never: float = 0.0) -> Tables:
    """Tables over up to three variables each; a share `never` of the cells is not allowed."""
    rng = numpy.random.default_rng(seed)
    tables = Tables()
    for _ in range(int(rng.integers(2, most))):
        tables.variable(int(rng.integers(1, 4)))
    for _ in range(int(rng.integers(1, 2 * most))):
        count = min(int(rng.integers(1, 4)), len(tables.sizes))
        over = [int(v) for v in rng.choice(len(tables.sizes), count, replace=False)]
        shape = [tables.sizes[v] for v in over]
        cells = rng.integers(0, 9, shape).astype(float)
        tables.price(over, numpy.where(rng.random(shape) < never, math.inf, cells))
    return tables


@pytest.mark.sample(40)
@pytest.mark.parametrize("never", [0.0, 0.3])
@pytest.mark.parametrize("seed", range(40))
def test_against_every_assignment(seed: int, never: float) -> None:
    tables = random_tables(seed, 7, never)
    least = min(tables.cost(list(values)) for values in itertools.product(*map(range, tables.sizes)))
    found, values = eliminate(tables)
    assert found == least
    assert tables.cost(values) == least


@pytest.mark.sample(40)
@pytest.mark.parametrize("never", [0.0, 0.3])
@pytest.mark.parametrize("seed", range(40))
def test_without_dead_ends_the_least_is_the_same(seed: int, never: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solver, "TOO_SLOW", 0)  # every elimination is too slow
    tables = random_tables(seed, 7, never)
    found, values = solver.minimize(tables)
    assert found == eliminate(tables)[0]
    assert tables.cost(values) == found


@pytest.mark.parametrize("seed", range(20))
def test_layers_alike_share_tables(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tables between other variables, in either order, and next to others."""
    monkeypatch.setattr(solver, "TOO_SLOW", 0)
    rng = numpy.random.default_rng(seed)
    shared = [rng.integers(0, 9, (3, 3)).astype(float) for _ in range(2)]
    tables = Tables(sizes=[3] * 7)
    for v in range(6):
        pair = (v, v + 1) if rng.random() < 0.5 else (v + 1, v)
        tables.price(pair, shared[int(rng.integers(2))])
    own = rng.integers(0, 9, 3).astype(float)
    for v in range(7):
        if rng.random() < 0.6:
            tables.price([v], own)
    apart = Tables(0.0, tables.sizes, [(over, table.copy()) for over, table in tables.factors])
    assert solver.find_live_values(tables) == solver.find_live_values(apart)
    assert solver.minimize(tables) == solver.minimize(apart)
    assert solver.minimize(tables)[0] == min(tables.cost([*v]) for v in itertools.product(range(3), repeat=7))


def test_dead_ends_are_dropped() -> None:
    """Of three values the first beats the second, and the third is as good as the first."""
    tables = Tables(sizes=[3, 2])
    tables.price([0], numpy.array([1.0, 2.0, 1.0]))
    tables.price([0, 1], numpy.array([[0.0, 1.0], [0.0, 1.0], [0.0, 1.0]]))
    assert solver.find_live_values(tables) == [[0], [0]]


@pytest.mark.parametrize("never", [0.0, 0.3])
@pytest.mark.parametrize("seed", range(100, 120))
def test_against_an_integer_program(seed: int, never: float) -> None:
    tables = random_tables(seed, 14, never)
    tables.constant = 3.0
    found, values = solve_integer_program(tables)
    assert found == eliminate(tables)[0]
    assert math.isinf(found) or tables.cost(values) == found


def test_prices_of_many_sizes() -> None:
    """A byte decides between two assignments that both pay what is never worth it."""
    tables = Tables()
    first, second = tables.variable(2), tables.variable(2)
    tables.price([first], numpy.array([1e16, 1e16]))
    tables.price([first, second], numpy.array([[2e6, 3e6], [3e6, 1e6]]))
    assert solve_integer_program(tables) == eliminate(tables) == (1e16 + 1e6, [1, 1])


def test_what_is_too_large_to_eliminate_is_an_integer_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any two of 30 variables pay for being unequal; a table of all has a billion cells. The least is a minimum cut."""
    rng, graph = numpy.random.default_rng(0), networkx.Graph()
    tables = Tables(sizes=[2] * 30)
    for one, other in itertools.combinations(range(30), 2):
        apart = int(rng.integers(1, 9))
        tables.price([one, other], apart * (1.0 - numpy.eye(2)))
        graph.add_edge(one, other, capacity=apart)
    for v in range(30):
        own = rng.integers(0, 99, 2)
        tables.price([v], own.astype(float))
        graph.add_edge("zero", v, capacity=int(own[1]))
        graph.add_edge(v, "one", capacity=int(own[0]))
    with pytest.raises(UnsupportedError):
        eliminate(tables)
    found, values = solver.minimize(tables)
    assert found == tables.cost(values) == networkx.minimum_cut_value(graph, "zero", "one")
    monkeypatch.setattr(solver, "MOST_INTEGER_CELLS", 100)
    with pytest.raises(UnsupportedError, match="in 1,800 cells"):
        solve_integer_program(tables)


def test_of_equals_the_first() -> None:
    tables = Tables()
    one, other = tables.variable(3), tables.variable(3)
    tables.price([one, other], numpy.ones((3, 3)))
    assert eliminate(tables) == (1.0, [0, 0])


def test_a_variable_beside_itself() -> None:
    tables = Tables()
    one = tables.variable(2)
    tables.price([one, one], numpy.array([[3.0, 0.0], [0.0, 2.0]]))
    assert eliminate(tables) == (2.0, [1])


def test_what_is_too_large_is_said() -> None:
    tables = Tables()
    over = [tables.variable(3) for _ in range(3)]
    for pair in itertools.combinations(over, 2):
        tables.price(pair, numpy.zeros((3, 3)))
    with pytest.raises(UnsupportedError, match="tables of 27 cells"):
        eliminate(tables, most=8)
