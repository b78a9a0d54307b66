"""What a written program says of itself: plain data in `node.meta["custom"]`, read back by views and checks."""

from __future__ import annotations

from typing import TypedDict

from torch import fx

from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.program import MARK, ORIGIN, RESHARD, Mark, Reshard

CLAIM = "tpcompiler"


class Claim(TypedDict, total=False):
    """origin: the node of the single-device program; sharding: one text per tensor output; reshard: its name."""

    origin: str
    sharding: list[str]
    reason: str
    reshard: str
    change: str
    why: str
    reshard_reason: str


def claim_of(node: fx.Node, mesh: Mesh) -> Claim | None:
    """The claim of a node of a rank's graph, from its mark and the reshard that it belongs to."""
    mark: Mark | None = node.meta.get(MARK)
    change: Reshard | None = node.meta.get(RESHARD)
    if mark is None and change is None and ORIGIN not in node.meta:
        return None
    claim = Claim(origin=node.meta.get(ORIGIN, node.name))
    if mark is not None:
        claim["sharding"] = [sharding.text(mesh) for sharding in mark.shardings]
        claim["reason"] = mark.reason
    if change is not None:
        claim["reshard"] = change.name
        claim["change"] = f"{change.source.text(mesh)} -> {change.target.text(mesh)}"
        claim["why"] = change.why
        claim["reshard_reason"] = change.reason
    return claim


def read_claim(node: fx.Node) -> Claim:
    """The claim that a written program carries on a node; empty for none."""
    custom = node.meta.get("custom") or {}
    found = custom.get(CLAIM) if isinstance(custom, dict) else None
    return found if isinstance(found, dict) else Claim()  # type: ignore[return-value]
