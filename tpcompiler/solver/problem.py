"""The placements of programs as a problem: its variables, what they may be, and tables of prices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy
from torch import fx

from tpcompiler.cost.objective import Objective
from tpcompiler.ir.memo import Memo
from tpcompiler.ir.program import PlannedProgram
from tpcompiler.ir.sharding import Sharding
from tpcompiler.solver.batch_dims import Samples
from tpcompiler.solver.minimize import Tables
from tpcompiler.solver.turn import Strategy, Turn

if TYPE_CHECKING:
    from tpcompiler.solver.domain import Domain

NEVER = numpy.inf
FEATURES = frozenset({"colwise", "rowwise", "replicate"})  # styles of a layer; of one weight of several, placements
# Seconds: prices are whole numbers of it, so that equal sums are equal whatever their order. Sums above 0.9 s are
# rounded to 53 bits: of all samples on a rank (`ALL_SAMPLES`) they are, and ties in the rest may then break otherwise.
UNIT = 1e-16


def in_units(seconds: Any) -> numpy.ndarray:
    """Return prices in whole units, rounded up."""
    return numpy.ceil(numpy.asarray(seconds) / UNIT)


class Values(NamedTuple):
    """The possible shardings of a value: one per value of a variable, or a single one."""

    variable: int | None
    shardings: tuple[Sharding, ...]


@dataclass(frozen=True)
class Layer:
    """A module with one weight, without a plan, or a weight among several.

    `styles`: what a plan says of it -> the dim of the weight that is cut, or none.
    """

    name: str
    variable: int
    styles: Mapping[str, int | None]


class Choices(NamedTuple):
    """The choices of an op with their prices, and the shardings that they need and produce, by operand and result."""

    each: Sequence[Strategy]
    units: numpy.ndarray
    wants: Sequence[tuple[Sharding, ...]]
    made: Sequence[tuple[Sharding, ...]]

    @classmethod
    def of(cls, each: Sequence[Strategy]) -> Choices:
        wants, made = (list(zip(*side, strict=True)) for side in ([c.wants for c in each], [c.made for c in each]))
        return cls(each, in_units([choice.seconds for choice in each]), wants, made)


class Gathers(NamedTuple):
    """The gathers of a leaf at rest: the number of times, and the axes."""

    axes: tuple[str, ...]
    times: int


@dataclass
class Problem:
    """The tables of programs, and what their variables are."""

    programs: Sequence[PlannedProgram]
    turn: Turn
    objective: Objective  # its price of a byte aside
    refused: float  # what it costs to gather a weight that the plan cuts
    samples: Samples
    tables: Tables = field(default_factory=Tables)
    storage: Tables = field(default_factory=Tables)  # bytes of weights, over the variables of `tables`
    domains: list[Domain] = field(default_factory=list)
    alone: list[list[Domain]] = field(default_factory=list)  # over each axis by itself: those of one axis
    layers: dict[str, Layer] = field(default_factory=dict)  # by weight
    owners: set[str] = field(default_factory=set)  # the modules of these
    groups: dict[fx.Node, str] = field(default_factory=dict)  # the leaf behind each placeholder
    leaves: dict[str, Values] = field(default_factory=dict)  # of those that have a say, by group
    values: dict[fx.Node, Values] = field(default_factory=dict)
    settled: dict[fx.Node, Values] = field(default_factory=dict)
    choices: dict[fx.Node, Choices] = field(default_factory=dict)
    variables: dict[fx.Node, int] = field(default_factory=dict)
    changes: list[tuple[fx.Node, Values, Values, bool, float]] = field(default_factory=list)
    known: Memo = field(default_factory=Memo)  # what layers alike share, and problems over this axis
    priced: set[str] = field(default_factory=set)  # weights whose bytes have a price
    resting: dict[fx.Node, Gathers] = field(default_factory=dict)  # leaves that are gathered for their uses
    capped: int = 0

    def price(self, axes: Sequence[Values], units: numpy.ndarray, of: Tables | None = None) -> None:
        """Add a table, an axis for each of the values, those without a variable too. `of`: `storage`, in bytes."""
        kept = [values.variable for values in axes if values.variable is not None]
        if len(kept) < len(axes):
            fixed = tuple(values.variable is None for values in axes)
            known = "of", id(units), fixed  # kept next to the result, so that no other table gets its id
            _, units = self.known.once(known, lambda: (units, units[tuple(0 if one else slice(None) for one in fixed)]))
        (of or self.tables).price(kept, units)

    def tables_at(self, byte_price: float, fixed: Iterable[tuple[int, Sequence[bool]]] = ()) -> Tables:
        """Return the tables with the bytes of weights at a price, in seconds, and with limits to some variables."""
        alike = {id(count): count for _, count in self.storage.factors}  # layers alike have the very same tables
        units = {own: in_units(byte_price * count) for own, count in alike.items()}
        factors = [*self.tables.factors, *((over, units[id(count)]) for over, count in self.storage.factors)]
        factors += [((variable,), numpy.where(allowed, 0.0, NEVER)) for variable, allowed in fixed]
        constant = self.tables.constant + float(in_units(byte_price * self.storage.constant))
        return Tables(constant, self.tables.sizes, factors, self.tables.order)

    def variable(self, shardings: tuple[Sharding, ...]) -> Values:
        return Values(self.tables.variable(len(shardings)) if len(shardings) > 1 else None, shardings)
