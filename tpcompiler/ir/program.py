"""The stage types. A pass takes one and returns the next, so a program cannot be at two stages at once.

Every stage keeps `source`, the canonical exported program (signature, state, pytrees, ranges), and its own `graph`.
Facts about a node are stored in `node.meta` under the keys below, so that they survive a copy of the graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument

from tpcompiler._torch import LEAF_KINDS, WRITTEN_KINDS, tree_names
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.sharding import Sharding, refuse_mixed
from tpcompiler.runtime.records import Note as Note

PIN = "tpcompiler_pin"
IN_TURNS = "tpcompiler_in_turns"  # on attention that gathers its keys in turns
BOTH = "tpcompiler_both"  # on a value chosen from both computed branches of a cond: the reason
UNCUT = "tpcompiler_uncut"  # on control flow that takes a planned weight: the reason why its bodies stay whole
GLOBAL = "tpcompiler_global"  # the global fake value of a node whose "val" is already local


@dataclass(frozen=True)
class Seed:
    """A placement that the user gave to a leaf (`PlannedProgram.seeds`) or to a value (meta[PIN] of a `pin` node).

    Attributes:
        axes: the axes that it constrains (all if empty); over the others a value stays as it is.
        loose: True for a style, which names the dim to shard but leaves units, blocks and parts to the leaf's uses.
        packed: True if the uses must reveal parts.
        others: the alternatives for the leaf when a change of the plan is searched for.
    """

    sharding: Sharding
    asked_by: str
    axes: tuple[str, ...] = ()
    loose: bool = False
    packed: bool = False
    others: tuple[Sharding, ...] = ()

    def over(self, have: Sharding) -> Sharding:
        """Return the target sharding of a value that is placed as `have`.

        Raises:
            ShardingError: reductions pending over other axes do not commute with its own.
        """
        target = self.sharding.beside(have, self.axes) if self.axes else self.sharding
        refuse_mixed(target.partial, "a value", self.asked_by)
        return target


@dataclass(frozen=True)
class InTurns:
    """A request that attention shards its steps over `axis`, and gathers keys and values in turns."""

    axis: str
    asked_by: str


def pin(value: Any) -> Any:
    """Graph marker: here the plan or the boundary asks for one sharding. Gone after `place`."""
    return value


def reshard(value: Any) -> Any:
    """Mark in the graph that the sharding changes here (`NodePlacement.reshard`). Gone after `lower_reshards`."""
    return value


fx.wrap("pin")
fx.wrap("reshard")


@dataclass(frozen=True)
class Program:
    """A graph and the single-device program that it came from."""

    source: ExportedProgram
    graph: fx.Graph

    def inputs(self) -> Iterator[tuple[fx.Node, InputSpec]]:
        """Yield each placeholder with its entry in the signature, in order."""
        placeholders = (node for node in self.graph.nodes if node.op == "placeholder")
        yield from zip(placeholders, self.source.graph_signature.input_specs, strict=True)

    def leaves(self) -> Iterator[tuple[fx.Node, str]]:
        """Yield the placeholders of parameters, buffers and constants, with their FQN."""
        for node, spec in self.inputs():
            if spec.kind in LEAF_KINDS and spec.target is not None:
                yield node, spec.target

    def output_names(self) -> list[str]:
        """Return a name for every user output: its path in the output's pytree, such as `logits` or `0`."""
        spec = self.source.call_spec.out_spec
        return tree_names(spec) if spec is not None else []

    def user_inputs(self) -> Iterator[fx.Node]:
        """Yield the placeholders of the user's tensors."""
        for node, spec in self.inputs():
            if spec.kind is InputKind.USER_INPUT and isinstance(spec.arg, TensorArgument):
                yield node

    @property
    def output(self) -> fx.Node:
        return self.graph.output_node()

    def mutations(self) -> Iterator[tuple[int, str]]:
        """Yield (position among the outputs, FQN of the leaf or name of the input) for every value written back."""
        for position, spec in enumerate(self.source.graph_signature.output_specs):
            if spec.kind in WRITTEN_KINDS and spec.target is not None:
                yield position, spec.target

    def written(self) -> Iterator[tuple[fx.Node, str]]:
        """Yield each value written back with the FQN of its buffer or the name of its input."""
        values: Any = self.output.args[0]
        yield from ((values[position], name) for position, name in self.mutations())

    def state(self, fqn: str) -> torch.Tensor:
        """Return the whole (single-device) value of a leaf."""
        value: torch.Tensor | None = self.source.state_dict.get(fqn)
        return self.source.constants[fqn] if value is None else value


class CanonicalProgram(Program):
    """A functional program without higher-order wrappers and metadata assertions."""


@dataclass(frozen=True)
class PlannedProgram(Program):
    """A program with its plan resolved: seeds on leaves (by placeholder name), `pin` nodes on values.

    Attributes:
        unseeded: leaves in layers that a style shards, without a dim that the style could shard, and who asked; their
            uses may shard them.
        kept: the plan's seeds on leaves that stay fixed when the search decides the rest.
    """

    mesh: Mesh
    seeds: Mapping[str, Seed]
    input_shardings: Mapping[str, Sharding]
    notes: tuple[Note, ...]
    unseeded: Mapping[str, str] = field(default_factory=dict)
    kept: Mapping[str, Seed] = field(default_factory=dict)

    def without(self, entries: Set[str]) -> PlannedProgram:
        """Return the program without the seeds on leaves that these plan entries (`Seed.asked_by`) caused."""
        seeds, kept = (
            {name: seed for name, seed in own.items() if seed.asked_by not in entries}
            for own in (self.seeds, self.kept)
        )
        return replace(self, seeds=seeds, kept=kept)


@dataclass(frozen=True)
class PlacedProgram(Program):
    """One program for all ranks: a NodePlacement on every node, a `reshard` at every change of sharding, no `pin`."""

    mesh: Mesh
    notes: tuple[Note, ...]


@dataclass(frozen=True)
class ClassProgram(Program):
    """The program of ranks that have equal local shapes."""

    mesh: Mesh
    ranks: tuple[int, ...]

    @property
    def here(self) -> dict[str, int]:
        """The mesh coordinate of the first of these ranks, whose shapes the program has."""
        return self.mesh.coordinate(self.ranks[0])


class LoweredProgram(ClassProgram):
    """A class program with collectives instead of reshards; sizes and `meta["val"]` are still global."""


class LocalProgram(ClassProgram):
    """A class program with local sizes, in arguments and in `meta["val"]`."""


@dataclass(frozen=True)
class ShardedProgram(Program):
    """A local graph with one rank's share of the state and its rank numbers."""

    mesh: Mesh
    rank: int
    local_state: Mapping[str, torch.Tensor]


def tied(program: Program) -> dict[str, str]:
    """Map each leaf's placeholder name to the first placeholder that holds the very same tensor."""
    first: dict[object, str] = {}
    out = {}
    for node, fqn in program.leaves():
        value = program.state(fqn)
        key: object = id(value)
        if type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout == torch.strided and value.numel():
            key = (value.untyped_storage().data_ptr(), value.storage_offset(), value.shape, value.stride())
        out[node.name] = first.setdefault(key, node.name)
    return out
