"""Claims: a written program's description of itself, plain data in `node.meta["custom"]` for views and checks."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, TypedDict

from torch import fx

from tpcompiler.errors import ArtifactError
from tpcompiler.ir import edit
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.program import BODY, CALL, MARK, ORIGIN, RESHARD, Mark, Reshard
from tpcompiler.ir.sharding import Sharding
from tpcompiler.runtime.artifact import Manifest

CLAIM = "tpcompiler"


class Claim(TypedDict, total=False):
    """origin: the node of the single-device program; sharding: one text per tensor output; reshard: its name.

    `call`: what is called on the whole (`ir/calls.py`), where the rank calls something else for its share. `body`: the
    origin that several nodes do a share of together. `change`: a reshard's shardings, from step to step. `parts`: the
    claims of the getitems that take this one's results apart, by index: torch writes no metadata of theirs.
    `stands_for`: the nodes that it replaces (`ir/symm_mem.py`).
    """

    origin: str
    sharding: list[str]
    reason: str
    call: dict[str, Any]
    body: str
    parts: dict[str, Any]
    stands_for: list[Any]
    reshard: str
    change: str
    why: str
    reshard_reason: str


FORMS: dict[str, Callable[[Any], bool]] = {
    name: (lambda value: isinstance(value, dict)) if name in ("call", "parts") else (lambda v: isinstance(v, str))
    for name in Claim.__annotations__
} | {
    "sharding": lambda value: isinstance(value, list) and all(isinstance(each, str) for each in value),
    "stands_for": lambda value: isinstance(value, list),
}


def claim_of(node: fx.Node, text: Callable[[Sharding], str]) -> Claim | None:
    """The claim of a node of a rank's graph, from its mark and the reshard that it belongs to."""
    mark: Mark | None = node.meta.get(MARK)
    change: Reshard | None = node.meta.get(RESHARD)
    if mark is None and change is None and ORIGIN not in node.meta:
        return None
    claim = Claim(origin=node.meta.get(ORIGIN, node.name))
    if mark is not None:
        claim["sharding"] = [text(sharding) for sharding in mark.shardings]
        claim["reason"] = mark.reason
    for key, name in ((CALL, "call"), (BODY, "body")):
        if key in node.meta:
            claim[name] = node.meta[key]  # type: ignore[literal-required]
    if change is not None:
        claim["reshard"] = change.name
        claim["change"] = " -> ".join(map(text, change.states))
        claim["why"] = change.why
        claim["reshard_reason"] = change.reason
    return claim


def read_change(claim: Claim) -> tuple[str, ...]:
    """Return the shardings of a change, from its source to its target; empty where none is claimed."""
    return tuple(claim["change"].split(" -> ")) if "change" in claim else ()


def write_claims(graph: fx.Graph, mesh: Mesh) -> None:
    """Put the claim of every call on its node, as plain data that `torch.export.save` keeps."""
    text = functools.cache(lambda sharding: sharding.text(mesh))
    for node in graph.nodes:
        claim = claim_of(node, text) if node.op == "call_function" else None
        if claim is None:
            continue
        node.meta["custom"] = {CLAIM: claim}
        if node.target is operator.getitem and ("body" in claim or "reshard" in claim):
            source, index = node.args
            source.meta["custom"][CLAIM].setdefault("parts", {})[str(index)] = claim


def read_claim(node: fx.Node) -> Claim:
    """The claim that a written program carries on a node; empty for none."""
    found = _custom(node)
    if node.target is operator.getitem:  # read from a file, it bears its source's
        source, index = node.args
        assert isinstance(source, fx.Node)
        parts = _custom(source).get("parts") or {}
        found = _formed(parts[str(index)]) if str(index) in parts else found
    return found


def records_of(graph: fx.Graph, manifest: Manifest) -> dict[fx.Node, dict[str, Any]]:
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


def _custom(node: fx.Node) -> Claim:
    custom = node.meta.get("custom") or {}
    return _formed(custom.get(CLAIM)) if isinstance(custom, dict) else Claim()


def _formed(found: object) -> Claim:
    """Return the well-formed entries; the others count as not claimed."""
    parts = found.items() if isinstance(found, dict) else ()
    return {name: value for name, value in parts if name in FORMS and FORMS[name](value)}  # type: ignore[return-value]
