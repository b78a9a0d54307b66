"""The stage types and their invariants.

A pass takes one stage and returns the next, so a program cannot be at two stages at once.
Every stage keeps `source`, the canonical exported program (signature, state, pytrees, ranges), and its own `graph`.
Facts about a node are stored in `node.meta` under the keys below, so that they survive a copy of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument

from tpcompiler._torch import GRADIENT_KINDS, LEAF_KINDS, WRITTEN_KINDS, tree_names
from tpcompiler.errors import InternalError
from tpcompiler.ir import edit
from tpcompiler.ir.constraints import AnyStyle, AsUsed, AtRest, Constraint
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.node_placement import PLACEMENT, placement_of
from tpcompiler.ir.sharding import Sharding
from tpcompiler.runtime.records import Note as Note

PIN = "tpcompiler_pin"
IN_TURNS = "tpcompiler_in_turns"  # an AxisRequest, on attention that is to gather its keys and values in turns
DISPATCH = "tpcompiler_dispatch"  # an AxisRequest, on a leaf of experts that tokens are to be sent to, and back
BOTH = "tpcompiler_both"  # on a value chosen from both computed branches of a cond: the reason
UNCUT = "tpcompiler_uncut"  # on control flow that takes a planned weight: the reason why its bodies stay whole
GLOBAL = "tpcompiler_global"  # the global fake value of a node whose "val" is already local


class AxisRequest(NamedTuple):
    """A request that a part of the program runs in another form over an axis."""

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


@dataclass(frozen=True, eq=False)
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

    def gradients(self) -> Iterator[tuple[int, str]]:
        """Yield (position among the outputs, FQN of the parameter or name of the input) for every gradient."""
        for position, spec in enumerate(self.source.graph_signature.output_specs):
            if spec.kind in GRADIENT_KINDS and spec.target is not None:
                yield position, spec.target

    def written(self) -> Iterator[tuple[fx.Node, str]]:
        """Yield each value written back with the FQN of its buffer or the name of its input."""
        values: Any = self.output.args[0]
        yield from ((values[position], name) for position, name in self.mutations())

    def followers(self) -> Iterator[tuple[fx.Node, str]]:
        """Yield each value that is placed as a leaf or an input is, with its name: written back, or its gradient."""
        values: Any = self.output.args[0]
        yield from ((values[position], name) for position, name in (*self.mutations(), *self.gradients()))

    def state(self, fqn: str) -> torch.Tensor:
        """Return the whole (single-device) value of a leaf."""
        value: torch.Tensor | None = self.source.state_dict.get(fqn)
        return self.source.constants[fqn] if value is None else value


def results_of(program: Program) -> dict[str, Any]:
    """Return the nodes, or constants, that a program returns to its user, by name."""
    values: Any = program.output.args[0]
    names = program.output_names()
    return dict(zip(names, list(values)[len(values) - len(names) :], strict=True))


class CanonicalProgram(Program):
    """A functional program without higher-order wrappers and metadata assertions."""


@dataclass(frozen=True, eq=False)
class PlannedProgram(Program):
    """A program with its plan resolved: constraints on leaves and inputs, `pin` nodes on values.

    Attributes:
        constraints: by placeholder name: every input has one, and every leaf that the plan concerns.
        rest: what leaves without a constraint may be.
        resting: parameters that are gathered for their uses, by placeholder name.
    """

    mesh: Mesh
    constraints: Mapping[str, Constraint]
    notes: tuple[Note, ...]
    rest: AnyStyle | AsUsed
    resting: Mapping[str, AtRest] = field(default_factory=dict)

    def at_rest(self, leaf: fx.Node, used: Sharding) -> Sharding:
        """Return the sharding in which ranks hold a leaf that its uses want as `used`."""
        own = self.resting.get(leaf.name)
        return used if own is None else own.apply(used, leaf.meta["val"].shape, self.mesh)

    @property
    def is_searched(self) -> bool:
        """True if the search decides the styles of layers that the plan does not name."""
        return isinstance(self.rest, AnyStyle)

    @property
    def planned(self) -> dict[str, Constraint]:
        """The plan's requests for leaves, by placeholder name: they place a leaf, or narrow the search."""
        return {name: own for name, own in self.constraints.items() if own.leaf and own.request is not None}

    def fixed(self, leaf: fx.Node) -> Constraint | None:
        """Return the constraint that places a leaf, or None if its uses or the search do."""
        constraint = self.constraints.get(leaf.name)
        return constraint if constraint is not None and constraint.is_fixed else None


def relax(
    program: PlannedProgram,
    is_relaxed: Callable[[Constraint], bool],
    instead: Callable[[Constraint], Constraint | None] = lambda constraint: None,
) -> PlannedProgram:
    """Return the program without some of the plan's requests for leaves, or with others `instead`."""
    relaxed = {name: instead(own) for name, own in program.planned.items() if is_relaxed(own)}
    if not relaxed:
        return program
    constraints = {name: relaxed.get(name, own) for name, own in program.constraints.items()}
    return replace(program, constraints={name: own for name, own in constraints.items() if own is not None})


@dataclass(frozen=True, eq=False)
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


@dataclass(frozen=True)
class LocalProgram(ClassProgram):
    """A class program with local sizes, in arguments and in `meta["val"]`.

    `unmoved`: the numbers of the collectives that are waited for at once, because memory is short.
    """

    unmoved: tuple[int, ...] = ()
    notes: tuple[Note, ...] = ()


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


def check_invariants(program: Program) -> None:
    """Check the invariants of the program's stage.

    Raises:
        InternalError: names the stage, the node and the violation.
    """
    for node in program.graph.nodes:
        if isinstance(program, PlacedProgram):
            _check_mark(node, program)
            _check_operands(node, program)
        if isinstance(program, LoweredProgram):
            _require(node.target not in (pin, reshard), node, program, "is still a marker")
        if isinstance(program, LocalProgram) and node.op == "call_function" and edit.is_tensor(node):
            sizes = (s for s in edit.shape(node))
            _require(all(not isinstance(s, int) or s >= 0 for s in sizes), node, program, "has a negative size")
    program.graph.lint()


def _check_mark(node: fx.Node, program: Program) -> None:
    _require(PLACEMENT in node.meta, node, program, "has no placement")
    mark = placement_of(node)
    values = edit.outputs(node) if node.op != "output" else ()
    _require(len(mark.shardings) == len(values), node, program, "has another number of shardings than of tensors")
    for sharding, value in zip(mark.shardings, values, strict=True):
        _require(sharding.ndim == value.ndim, node, program, f"of {value.ndim} dims has a sharding of {sharding.ndim}")
        cut = [axis for dim in sharding.dims for axis in dim.axes] + [axis for axis, _ in sharding.partial]
        _require(len(cut) == len(set(cut)), node, program, "uses a mesh axis twice")


def _check_operands(node: fx.Node, program: Program) -> None:
    _require(node.target is not pin, node, program, "is still a pin")
    for operand, want in zip(edit.operands(node), placement_of(node).wants, strict=False):
        _require(
            placement_of(operand).shardings[0] == want,
            node,
            program,
            f"has '{operand.name}' in another sharding than it needs",
        )


def _require(holds: bool, node: fx.Node, program: Program, what: str) -> None:
    if not holds:
        raise InternalError(
            f"{type(program).__name__}: '{node.name}' {what}",
            help="report this with the model and the plan",
            used_at=edit.source_line(node),
        )
