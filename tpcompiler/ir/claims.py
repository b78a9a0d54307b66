"""Claims: a written program's description of itself, plain data in `node.meta["custom"]` for views and checks."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

from msgspec.structs import asdict
from torch import fx

from tpcompiler.errors import ArtifactError
from tpcompiler.ir import edit
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.program import BODY, CALL, MARK, ORIGIN, RESHARD, Mark, Reshard
from tpcompiler.ir.sharding import Sharding
from tpcompiler.runtime.artifact import Manifest
from tpcompiler.runtime.records import CallRecord, Collective, Record, read_record

CLAIM = "tpcompiler"


class Claim(Record, frozen=True, kw_only=True):
    """A node's share of the single-device program."""

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


def claim_of(node: fx.Node, text: Callable[[Sharding], str]) -> Claim | None:
    """The claim of a node of a rank's graph, from its mark and the reshard that it belongs to."""
    mark: Mark | None = node.meta.get(MARK)
    change: Reshard | None = node.meta.get(RESHARD)
    if mark is None and change is None and ORIGIN not in node.meta:
        return None
    return Claim(
        origin=node.meta.get(ORIGIN, node.name),
        sharding=None if mark is None else [text(sharding) for sharding in mark.shardings],
        reason=None if mark is None else mark.reason,
        call=node.meta.get(CALL),
        body=node.meta.get(BODY),
        reshard=None if change is None else change.name,
        change=None if change is None else " -> ".join(map(text, change.states)),
        why=None if change is None else change.why,
        reshard_reason=None if change is None else change.reason,
    )


def write_claims(graph: fx.Graph, mesh: Mesh) -> None:
    """Put the claim of every call on its node, as plain data that `torch.export.save` keeps."""
    text = functools.cache(lambda sharding: sharding.text(mesh))
    for node in graph.nodes:
        claim = claim_of(node, text) if node.op == "call_function" else None
        if claim is None:
            continue
        node.meta["custom"] = {CLAIM: claim_data(claim)}
        if node.target is operator.getitem and (claim.body is not None or claim.reshard is not None):
            source, index = node.args
            source.meta["custom"][CLAIM].setdefault("parts", {})[str(index)] = claim_data(claim)


def claim_data(value: Any) -> Any:
    """Return what files have of a claim; the arguments of its call are data already."""
    if isinstance(value, Record):
        return claim_data({name: each for name, each in asdict(value).items() if each is not None})
    return {name: claim_data(each) for name, each in value.items()} if isinstance(value, dict) else value


def read_claim(node: fx.Node) -> Claim:
    """The claim that a written program carries on a node; empty for none.

    Raises:
        ArtifactError: a claim of another form.
    """
    claim = _read(node)
    if node.target is operator.getitem:  # read from a file, it bears its source's
        source, index = node.args
        assert isinstance(source, fx.Node)
        claim = (_read(source).parts or {}).get(str(index), claim)
    return claim


def records_of(graph: fx.Graph, manifest: Manifest) -> dict[fx.Node, Collective]:
    """The manifest's record of each collective; all ranks call the same ones in the same order.

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


def _read(node: fx.Node) -> Claim:
    custom = node.meta.get("custom") or {}
    try:
        return read_record(Claim, custom.get(CLAIM, {}))
    except (AttributeError, ValueError) as error:
        raise ArtifactError(
            f"'{node.name}' has a claim that is damaged{error}", help="convert the model again"
        ) from error
