"""The placement of a node: its share of the single-device program. In memory typed; in files a claim, plain data.

A claim also records the whole call whose share a rank's program computes, where the rank calls something else.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from msgspec.structs import asdict
from torch import fx

from tpcompiler._torch import op_overload
from tpcompiler.errors import ArtifactError
from tpcompiler.ir import edit
from tpcompiler.ir.dim_sharding import DimSharding, Size
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.sharding import Sharding
from tpcompiler.runtime.artifact import Manifest
from tpcompiler.runtime.records import CallRecord, Collective, Record, Why, read_record

PLACEMENT = "tpcompiler_placement"  # the key of a NodePlacement in `node.meta`, until the rank programs are built
CLAIM = "tpcompiler"  # the key of a Claim in `node.meta["custom"]`, which `torch.export.save` keeps
NAMED = (torch.dtype, torch.layout, torch.memory_format)  # printed as `torch.x`

Counts = Mapping[str, tuple[tuple[tuple[Size, DimSharding], ...], ...]]


@dataclass(frozen=True)
class LocalShare:
    """A body that computes one shard's share, and the factors, with sizes, whose ranges it needs.

    `range_of`: the range for the rank at a coordinate.
    """

    body: Callable[..., Any]
    cuts: tuple[tuple[DimSharding, Size], ...]
    range_of: Callable[[Mesh, Mapping[str, int]], Any]


@dataclass(frozen=True)
class Reshard:
    """One change of sharding, of a `reshard` node and of every node that it is lowered to.

    `via`: the shardings after each step except the last (`choose_paths`).
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
class NodePlacement:
    """The decisions about one node.

    Attributes:
        shardings: of its results, one per tensor; none inside of a reshard or a body.
        wants: what it needs of each tensor operand, in the order of `edit.operands`.
        reason: why, for people.
        why: the kind of the changes of sharding that its operands need.
        sizes: size argument -> for each entry, the dim of the first output that it counts.
        local: set if a plain local run of the op would be wrong.
        counts: argument -> for each entry, the factors that it counts together, with their sizes and cuts.
        skips_empty: True if an empty share of its output is made without running it.
        origin: the node of the single-device program, if that has another name.
        reshard: the change of sharding that it does, or belongs to.
        body: the op whose share it computes together with others, if its rule's body replaced the op.
        call: the single-device call, if a rank calls something else for its share.
    """

    shardings: tuple[Sharding, ...] = ()
    wants: tuple[Sharding, ...] = ()
    reason: str = ""
    why: Why = "fallback"
    sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    local: LocalShare | None = None
    counts: Counts = field(default_factory=dict)
    skips_empty: bool = False
    origin: str | None = None
    reshard: Reshard | None = None
    body: str | None = None
    call: CallRecord | None = None


class Claim(Record, frozen=True, kw_only=True):
    """The placement of a node as a file has it: a reader must not trust it."""

    origin: str | None = None  # the node of the single-device program
    sharding: list[str] | None = None  # one text per tensor output
    reason: str | None = None  # the cause of the sharding
    call: CallRecord | None = None  # the call on the whole, where the rank calls something else for its share
    body: str | None = None  # the origin that several nodes do a share of together
    reshard: str | None = None  # the name of the change of sharding that the node belongs to
    change: str | None = None  # its shardings from step to step, such as `P(sum) -> R`
    why: str | None = None  # `inherent`, `plan-demanded` or `fallback`
    reshard_reason: str | None = None  # the cause of the change
    # the claims of the getitems that take this node's results apart, by index: torch writes no metadata of theirs
    parts: dict[str, Claim] | None = None
    stands_for: list[Any] | None = None  # the nodes that it replaces (`ir/symm_mem.py`)

    @property
    def region(self) -> str | None:
        """The name of the change, or of the body, that it belongs to."""
        return self.reshard or self.body

    @property
    def states(self) -> tuple[str, ...]:
        """The shardings of the change, from its source to its target; empty without one."""
        return () if self.change is None else tuple(self.change.split(" -> "))


def placement_of(node: fx.Node) -> NodePlacement:
    placement = node.meta[PLACEMENT]
    assert isinstance(placement, NodePlacement)
    return placement


def has_reshard(node: fx.Node) -> bool:
    placement: NodePlacement | None = node.meta.get(PLACEMENT)
    return placement is not None and placement.reshard is not None


def reshard_of(node: fx.Node) -> Reshard:
    """Return the change of sharding of a node that has one."""
    change = placement_of(node).reshard
    assert change is not None
    return change


def put_reshard(node: fx.Node, change: Reshard) -> None:
    """Put a change of sharding on a `reshard` node, as its placement."""
    node.meta[PLACEMENT] = NodePlacement((change.target,), (change.source,), change.reason, change.why, reshard=change)


def origin_of(node: fx.Node) -> str:
    """Return the name of the node of the single-device program."""
    placement: NodePlacement | None = node.meta.get(PLACEMENT)
    return node.name if placement is None or placement.origin is None else placement.origin


def write_claims(graph: fx.Graph, mesh: Mesh) -> None:
    """Put the placement of every call on its node as plain data."""
    text = functools.cache(lambda sharding: sharding.text(mesh))
    for node in edit.calls(graph):
        placement: NodePlacement | None = node.meta.get(PLACEMENT)
        if placement is None:
            continue
        claim = _claim_of(node, placement, text)
        node.meta["custom"] = {CLAIM: claim_data(claim)}
        if node.target is operator.getitem and claim.region is not None:
            source, index = node.args
            source.meta["custom"][CLAIM].setdefault("parts", {})[str(index)] = claim_data(claim)  # type: ignore[union-attr]


def _claim_of(node: fx.Node, placement: NodePlacement, text: Callable[[Sharding], str]) -> Claim:
    change = placement.reshard
    is_placed = bool(placement.shardings or placement.reason)
    return Claim(
        origin=origin_of(node),
        sharding=list(map(text, placement.shardings)) if is_placed else None,
        reason=placement.reason if is_placed else None,
        call=placement.call,
        body=placement.body,
        reshard=None if change is None else change.name,
        change=None if change is None else " -> ".join(map(text, change.states)),
        why=None if change is None else change.why,
        reshard_reason=None if change is None else change.reason,
    )


def claim_data(value: Any) -> Any:
    """Return what files have of a claim; the arguments of its call are data already."""
    if isinstance(value, Record):
        return claim_data({name: each for name, each in asdict(value).items() if each is not None})
    return {name: claim_data(each) for name, each in value.items()} if isinstance(value, dict) else value


def claims_of(graph: fx.Graph) -> Iterator[tuple[fx.Node, Claim]]:
    """Yield every call of a rank's graph that has a claim.

    Raises:
        ArtifactError: as `read_claim`.
    """
    for node in edit.calls(graph):
        if (claim := read_claim(node)) != NO_CLAIM:
            yield node, claim


def read_claim(node: fx.Node) -> Claim:
    """Return the claim on a node; `NO_CLAIM` without one.

    Raises:
        ArtifactError: a claim of another form.
    """
    claim = _read(node)
    if node.target is operator.getitem:  # read from a file, it bears its source's
        source, index = node.args
        assert isinstance(source, fx.Node)
        claim = (_read(source).parts or {}).get(str(index), claim)
    return claim


def _read(node: fx.Node) -> Claim:
    custom = node.meta.get("custom") or {}
    try:
        return read_record(Claim, custom[CLAIM]) if CLAIM in custom else NO_CLAIM
    except (TypeError, ValueError) as error:
        raise ArtifactError(
            f"'{node.name}' has a claim that is damaged{error}", help="convert the model again"
        ) from error


def records_of(graph: fx.Graph, manifest: Manifest) -> dict[fx.Node, Collective]:
    """Return the manifest's record of each collective; all ranks call the same ones in the same order.

    Raises:
        ArtifactError: the program calls more or fewer.
    """
    nodes = [node for node in edit.calls(graph) if edit.is_collective(node)]
    if len(nodes) != len(manifest.collectives):
        raise ArtifactError(
            f"the program calls {len(nodes)} collectives, the manifest records {len(manifest.collectives)}",
            help="convert the model again",
        )
    return dict(zip(nodes, manifest.collectives, strict=True))


NO_CLAIM = Claim()


def write_call(node: fx.Node) -> CallRecord:
    """Return the op and all its arguments in a JSON-compatible form, nodes by name."""
    assert isinstance(node.target, torch._ops.OpOverload)
    return CallRecord(
        op=f"{node.target._schema.name}.{node.target._overloadname}",
        args=[_to_json(value) for value in node.args],
        kwargs={name: _to_json(value) for name, value in node.kwargs.items()},
    )


def read_call(
    call: CallRecord, value: Callable[[str], Any], device: torch.device
) -> tuple[torch._ops.OpOverload, tuple[Any, ...], dict[str, Any]]:
    """Read back a call that `write_call` wrote, with nodes replaced by `value(name)` and devices by `device`.

    Returns:
        (op, args, kwargs)

    Raises:
        ValueError: `call` is no such call.
    """
    op = op_overload(call.op)
    if op is None:
        raise ValueError(f"{call.op!r} is no op that torch has here")

    def read(argument: Any) -> Any:
        if isinstance(argument, list):
            return [read(each) for each in argument]
        if not isinstance(argument, dict):
            return argument
        ((kind, text),) = argument.items()
        if kind == "node":
            return value(text)
        if kind == "device":
            return device
        constant = getattr(torch, str(text), None) if kind == "torch" else float(text) if kind == "float" else None
        if kind not in ("torch", "float") or (kind == "torch" and not isinstance(constant, NAMED)):
            raise ValueError(f"{argument!r} is no argument of a call")
        return constant

    return op, tuple(map(read, call.args)), {name: read(each) for name, each in call.kwargs.items()}


def nodes_named(call: CallRecord) -> set[str]:
    """Return the names of the nodes in a call's arguments."""

    def names(value: Any) -> Iterator[str]:
        if isinstance(value, list):
            for each in value:
                yield from names(each)
        elif isinstance(value, dict) and "node" in value:
            yield value["node"]

    return {*names(list(call.args)), *names(list(call.kwargs.values()))}


def _to_json(value: Any) -> Any:
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, (list, tuple)):
        return [_to_json(each) for each in value]
    if isinstance(value, NAMED):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": value.type}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    return value
