"""The result of a search."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from torch import fx

from tpcompiler.cost.fusion import Kernel
from tpcompiler.cost.machine import Machine
from tpcompiler.ir import edit
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.program import PlannedProgram
from tpcompiler.ir.sharding import Sharding
from tpcompiler.runtime.records import Optimizer
from tpcompiler.solver.turn import Strategy

if TYPE_CHECKING:
    from tpcompiler.solver.estimate import Memory

Turns = tuple[tuple[str, ...], ...]


class Place(NamedTuple):
    """A dim of an operand, and an axis that may shard it, with its degree."""

    axis: str
    degree: int
    dim: int


Openings = Mapping[tuple[int, str], Set[Place]]  # of calls, by program and name: the dims that their own ops need whole


def join_places(found: Iterable[tuple[tuple[int, str], Set[Place]]]) -> Openings:
    """Return all places of each call."""
    joined: dict[tuple[int, str], Set[Place]] = {}
    for call, places in found:
        joined[call] = joined.get(call, frozenset()) | places
    return joined


class Layered(NamedTuple):
    """A layer as a plan names it, the style that the search gave it, and the dim of its weight that this cuts."""

    name: str
    style: str
    dim: int | None


@dataclass(frozen=True)
class Solution:
    """The choice of every op and leaf of the programs, on a mesh with axes that may have been split in two.

    Attributes:
        machine: by whose seconds.
        leaves: the shardings of leaves and inputs, by placeholder.
        settled: what values with several users are turned into for all of them.
        layers: what the search decides, by weight.
        kernels: of the graphs of the programs, as `find_kernels`.
        seconds: infinite where nothing suits all that is asked for.
        capped: ops and values that had more choices than were looked at.
        openings: the calls that could be cut more freely in simpler ops, and where.
        simpler: those that are in simpler ops.
        model: the axes over which layers are cut, in order.
        turns: the axes over which there was a choice, in the order in which they were solved; those of a turn at once.
        bound: seconds that no placement that fits a rank takes less than, if the fastest does not fit; 0 if unknown.
        freed: seconds of the best placements that were found without the plan's entries for leaves, infinite if they do
            not fit a rank; None without such entries, or if the seconds of these do not compare.
        batch: of a search that may, the axes over which it cuts samples or tokens.
        heads: axes with more ranks than heads, how many ranks the outer half of two axes could have, and whether the
            inner half is solved first, where heads are cut.
        is_tight: the fastest placements do not fit a rank, and these do.
        too_large: no placement fits a rank: the memory of the smallest one that was found.
        conflict: without a placement, the entries of the plan that conflict.
        given: the programs before the search, in the form that it took.
        forms: styles of other forms that the search took, one mapping for each form.
        declined: forms that were tried and could not be had, each with the reason.
        searches: the number of searches by their kind.
        optimizer: whose state ranks hold next to parameters with gradients.
    """

    programs: Sequence[PlannedProgram]
    machine: Machine
    choices: Mapping[fx.Node, Strategy] = field(default_factory=dict)
    leaves: Mapping[fx.Node, Sharding] = field(default_factory=dict)
    settled: Mapping[fx.Node, Sharding] = field(default_factory=dict)
    layers: Mapping[str, Layered] = field(default_factory=dict)
    kernels: Mapping[fx.Graph, Mapping[fx.Node, Kernel]] = field(default_factory=dict)
    seconds: float = 0.0
    capped: int = 0
    openings: Openings = field(default_factory=dict)
    simpler: Openings = field(default_factory=dict)
    model: tuple[str, ...] = ()
    turns: Turns = ()
    bound: float = 0.0
    freed: float | None = None
    batch: tuple[str, ...] = ()
    heads: tuple[tuple[str, int, bool], ...] = ()
    is_tight: bool = False
    too_large: Memory | None = None
    conflict: tuple[str, ...] = ()
    given: Sequence[PlannedProgram] = ()
    forms: tuple[Mapping[str, str], ...] = ()
    declined: tuple[str, ...] = ()
    searches: Mapping[str, int] = field(default_factory=dict)
    optimizer: Optimizer = "adamw"

    def made(self, node: fx.Node) -> Sequence[Sharding]:
        """Return the shardings of the tensors that a node makes."""
        if node in self.leaves:
            return [self.leaves[node]]
        if node in self.choices:
            return self.choices[node].made
        return [Sharding.replicated(value.ndim) for value in edit.outputs(node)]

    def sharding(self, value: fx.Node) -> Sharding:
        """Return the sharding with which a value is made."""
        node, at = edit.producer(value)
        return self.made(node)[at]

    def seen(self, value: fx.Node) -> Sharding:
        """Return the sharding that the users of a value see."""
        return self.settled.get(value) or self.sharding(value)

    @property
    def mesh(self) -> Mesh:
        return self.programs[0].mesh

    @property
    def lacks_memory(self) -> bool:
        """True if the fastest placements do not fit a rank."""
        return self.is_tight or self.too_large is not None

    @property
    def above(self) -> float | None:
        """Return the largest relative distance from the optimum; None if it is unknown."""
        if len(self.turns) > 1:  # turns have choices that the bound, of all axes at once, does not know
            return None
        if self.bound:
            return max(0.0, self.seconds / self.bound - 1)
        return None if self.is_tight else 0.0

    @property
    def rank(self) -> tuple[int, float]:
        """Less is better: the fastest call that fits, or the fewest bytes on a rank."""
        return (0, self.seconds) if self.too_large is None else (1, self.too_large.total)

    @property
    def styles(self) -> dict[str, str]:
        """Return the style of every layer, or of a weight that is one of several in a module."""
        return {own.name: own.style for own in self.layers.values()}
