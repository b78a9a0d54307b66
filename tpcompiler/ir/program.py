"""The stage types. A pass takes one and returns the next, so a program cannot be at two stages at once.

Every stage keeps `source`, the canonical exported program (signature, state, pytrees, ranges), and its own `graph`.
Facts about one node lie in `node.meta` under the keys below, so that they survive a copy of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument

from tpcompiler._torch import LEAF_KINDS, WRITTEN_KINDS, tree_names
from tpcompiler.ir.dim_sharding import DimSharding, Size
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.sharding import Sharding, refuse_mixed

MARK = "tpcompiler_mark"
ORIGIN = "tpcompiler_origin"
RESHARD = "tpcompiler_reshard"
PIN = "tpcompiler_pin"
IN_TURNS = "tpcompiler_in_turns"  # of attention that is to gather its keys so
BOTH = "tpcompiler_both"  # of a value chosen from both branches of a cond, which are computed: why
UNCUT = "tpcompiler_uncut"  # of control flow that takes a planned weight: why its bodies stay whole
CALL = "tpcompiler_call"  # the call of the whole, as data, where a rank runs another one for its share
BODY = "tpcompiler_body"  # the op that a node does a share of, where its rule's body has taken its place
GLOBAL = "tpcompiler_global"  # the global fake value of a node whose "val" is local already

Why = Literal["inherent", "plan-demanded", "fallback"]


Counts = Mapping[str, tuple[tuple[tuple[Size, DimSharding], ...], ...]]


@dataclass(frozen=True)
class LocalShare:
    """A body that computes one shard's share, and the factors, with their sizes, that it needs the range of."""

    body: Callable[..., Any]
    cuts: tuple[tuple[DimSharding, Size], ...]


@dataclass(frozen=True)
class Mark:
    """What is decided about one node.

    Attributes:
        shardings: what its rule makes, one per tensor output.
        settled: what its users see: prompt reductions done.
        wants: what it needs of each tensor operand, in the order of `edit.operands`.
        reason: why, for people.
        why: the kind of the changes of sharding that its operands need.
        sizes: size argument -> for each of its entries the dim of the first output that it counts.
        local: set when a plain local run of the op would be wrong.
        skips_empty: an empty share of what it makes is made without it.
        counts: argument -> for each of its entries the factors that it counts together, with their sizes and cuts.
    """

    shardings: tuple[Sharding, ...]
    settled: tuple[Sharding, ...]
    wants: tuple[Sharding, ...]
    reason: str
    why: Why = "fallback"
    sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    local: LocalShare | None = None
    counts: Counts = field(default_factory=dict)
    skips_empty: bool = False


@dataclass(frozen=True)
class Reshard:
    """One change of sharding: `reshard` nodes carry it, and so does everything that one is lowered to.

    `via`: what the value is on the way, after each step but the last (`choose_paths`).
    """

    name: str
    source: Sharding
    target: Sharding
    why: Why
    reason: str
    via: tuple[Sharding, ...] = ()

    @property
    def states(self) -> tuple[Sharding, ...]:
        return (self.source, *self.via, self.target)


@dataclass(frozen=True)
class Seed:
    """A placement that the user gave, to a leaf (`PlannedProgram.seeds`) or to a value (meta[PIN] of a `pin` node).

    `axes`: those that it speaks of (none: all of them); over the others a value stays as it is. `loose`: a style's,
    which names the dim that is cut; where in it the cuts lie is for its uses to say. `packed`: they must show parts.
    `others`: what the leaf may be instead, where a change of the plan is sought.
    """

    sharding: Sharding
    asked_by: str
    axes: tuple[str, ...] = ()
    loose: bool = False
    packed: bool = False
    others: tuple[Sharding, ...] = ()

    def over(self, have: Sharding) -> Sharding:
        """What a value that is placed as `have` is to become.

        Raises:
            ShardingError: reductions that wait over other axes do not commute with its own.
        """
        made = self.sharding.beside(have, self.axes) if self.axes else self.sharding
        refuse_mixed(made.partial, "a value", self.asked_by)
        return made


@dataclass(frozen=True)
class InTurns:
    """That attention cuts its steps over an axis, and gathers keys and values a part at a time (`attend_in_turns`)."""

    axis: str
    asked_by: str


@dataclass(frozen=True)
class Note:
    """What a pass declined, gave up or could not use, for the report."""

    kind: Literal[
        "plan",
        "untouched",
        "whole",
        "dropped",
        "no rule",
        "size",
        "random",
        "mesh",
        "shared",
        "idle",
        "cut",
        "both",
        "examples",
        "collectives",
        "search",
        "uncut",
    ]
    text: str


def pin(value: Any) -> Any:
    """Graph marker: here the plan or the boundary asks for one sharding. Gone after `insert_reshards`."""
    return value


def reshard(value: Any) -> Any:
    """Graph marker: here the sharding changes (meta[RESHARD]). Gone after `lower_reshards`."""
    return value


fx.wrap("pin")
fx.wrap("reshard")


@dataclass(frozen=True)
class Program:
    source: ExportedProgram
    graph: fx.Graph

    def inputs(self) -> Iterator[tuple[fx.Node, InputSpec]]:
        """Placeholders beside what the signature says of them, in order."""
        placeholders = (node for node in self.graph.nodes if node.op == "placeholder")
        yield from zip(placeholders, self.source.graph_signature.input_specs, strict=True)

    def leaves(self) -> Iterator[tuple[fx.Node, str]]:
        """Placeholders of parameters, buffers and constants, with their FQN."""
        for node, spec in self.inputs():
            if spec.kind in LEAF_KINDS and spec.target is not None:
                yield node, spec.target

    def output_names(self) -> list[str]:
        """A name for every user output: its path in the output's pytree, such as `logits` or `0`."""
        spec = self.source.call_spec.out_spec
        return tree_names(spec) if spec is not None else []

    def user_inputs(self) -> Iterator[fx.Node]:
        """Placeholders of the user's tensors."""
        for node, spec in self.inputs():
            if spec.kind is InputKind.USER_INPUT and isinstance(spec.arg, TensorArgument):
                yield node

    @property
    def output(self) -> fx.Node:
        return self.graph.output_node()

    def mutations(self) -> Iterator[tuple[int, str]]:
        """(position among the outputs, FQN of the leaf or name of the input) of every value written back."""
        for position, spec in enumerate(self.source.graph_signature.output_specs):
            if spec.kind in WRITTEN_KINDS and spec.target is not None:
                yield position, spec.target

    def written(self) -> Iterator[tuple[fx.Node, str]]:
        """The value beside the FQN of the buffer or the name of the input that it is written back to."""
        values: Any = self.output.args[0]
        yield from ((values[position], name) for position, name in self.mutations())

    def state(self, fqn: str) -> torch.Tensor:
        """The whole (single-device) value of a leaf."""
        value: torch.Tensor | None = self.source.state_dict.get(fqn)
        return self.source.constants[fqn] if value is None else value


class CanonicalProgram(Program):
    """Functional, no higher-order wrappers, no metadata assertions."""


@dataclass(frozen=True)
class PlannedProgram(Program):
    """The plan resolved: seeds on leaves (by placeholder name), `pin` nodes on values.

    `unseeded`: leaves of layers that a style cuts, for which it found no dim to cut; who asked. Their uses may.
    `kept`: where the search decides the rest, what the plan says of leaves, to which the search keeps.
    """

    mesh: Mesh
    seeds: Mapping[str, Seed]
    input_shardings: Mapping[str, Sharding]
    notes: tuple[Note, ...]
    unseeded: Mapping[str, str] = field(default_factory=dict)
    kept: Mapping[str, Seed] = field(default_factory=dict)

    def without(self, entries: Set[str]) -> PlannedProgram:
        """The program without what these entries of the plan, by `Seed.asked_by`, say of leaves."""
        seeds, kept = (
            {name: seed for name, seed in own.items() if seed.asked_by not in entries}
            for own in (self.seeds, self.kept)
        )
        return replace(self, seeds=seeds, kept=kept)


@dataclass(frozen=True)
class PlacedProgram(Program):
    """One program for all ranks, of which every tensor value carries a Mark."""

    mesh: Mesh
    notes: tuple[Note, ...]


class MarkedProgram(PlacedProgram):
    """Changes of sharding are implicit: an op may want a value otherwise than it is made."""


class ReshardedProgram(PlacedProgram):
    """Every change of sharding is a `reshard` node; no `pin` is left."""


@dataclass(frozen=True)
class ClassProgram(Program):
    """The program of ranks that hold equal local shapes."""

    mesh: Mesh
    ranks: tuple[int, ...]

    @property
    def here(self) -> dict[str, int]:
        """Where in the mesh the first of these ranks is: shapes are its own."""
        return self.mesh.coordinate(self.ranks[0])


class LoweredProgram(ClassProgram):
    """Collectives instead of reshards; sizes and `meta["val"]` are still the whole's."""


class LocalProgram(ClassProgram):
    """Sizes in arguments and in `meta["val"]` are this rank's own."""


@dataclass(frozen=True)
class ShardedProgram(Program):
    """A local graph beside its rank's own share of the state, its numbers among it."""

    mesh: Mesh
    rank: int
    local_state: Mapping[str, torch.Tensor]


def mark_of(node: fx.Node) -> Mark:
    mark = node.meta[MARK]
    assert isinstance(mark, Mark)
    return mark


def tied(program: Program) -> dict[str, str]:
    """Placeholder name -> name of the first placeholder that holds the very same tensor."""
    first: dict[object, str] = {}
    out = {}
    for node, fqn in program.leaves():
        value = program.state(fqn)
        key: object = id(value)
        if type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout == torch.strided and value.numel():
            key = (value.untyped_storage().data_ptr(), value.storage_offset(), value.shape, value.stride())
        out[node.name] = first.setdefault(key, node.name)
    return out
