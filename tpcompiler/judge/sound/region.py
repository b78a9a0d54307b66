"""Regions: nodes of a rank's program that together stand for one node or change of the single-device program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from tpcompiler.ir.node_placement import Claim
from tpcompiler.judge.sound.numbers import Numbers
from tpcompiler.judge.sound.ordered import Ordered, find_ordered


@dataclass(frozen=True)
class ProgramRegion:
    """The nodes that ranks run for one change of sharding or, with `call`, for a share of one op.

    `inputs`: the outside nodes that they use; `outputs`: those of them that others use; `numbers`: the rank's numbers
    that they read. `ordered`: floats encoded as integers of the same order, and back (`ir/nan_safe_reduce.py`).
    """

    name: str
    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    numbers: tuple[fx.Node, ...] = ()
    call: Any = None
    ordered: tuple[Ordered, ...] = ()


def find_regions(claims: Mapping[fx.Node, Claim], numbers: Numbers) -> dict[str, ProgramRegion]:
    """Return all regions of a graph, by the names in their claims."""
    members: dict[str, list[fx.Node]] = {}
    for node, claim in claims.items():
        if name := claim.region:
            members.setdefault(f"{'body' if claim.reshard is None else 'reshard'} {name}", []).append(node)
    regions = {}
    for name, nodes in members.items():
        own = set(nodes)
        used = dict.fromkeys(each for node in nodes for each in node.all_input_nodes if each not in own)
        inputs = tuple(node for node in used if node not in numbers.read)
        read = tuple(node for node in used if node in numbers.read)
        # A rank with an empty share of the next value may use none of the nodes.
        outputs = tuple(node for node in nodes if any(user not in own for user in node.users)) or (nodes[-1],)
        ordered = tuple(find_ordered(nodes)) if name.startswith("reshard") else ()
        regions[name] = ProgramRegion(name, tuple(nodes), inputs, outputs, read, ordered=ordered)
    return regions
