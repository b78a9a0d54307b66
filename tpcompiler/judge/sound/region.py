"""Regions: nodes of a rank's program that stand for one node or change of the whole, and the numbers that they read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx
from torch.export import ExportedProgram

from tpcompiler._torch import aten
from tpcompiler.ir import edit
from tpcompiler.ir.node_placement import NO_CLAIM, Claim
from tpcompiler.judge.sound.ordered import Ordered, find_ordered
from tpcompiler.judge.sound.unsound import Unsound
from tpcompiler.runtime.artifact import Manifest


@dataclass(frozen=True)
class Numbers:
    """The rank's numbers that a program reads: the only way in which ranks with one graph may behave differently.

    `read`: node -> index of the number it reads; `nodes`: these and their operands, which the whole lacks.
    """

    read: Mapping[fx.Node, int] = field(default_factory=dict)
    nodes: frozenset[fx.Node] = frozenset()

    def of(self, nodes: Sequence[fx.Node], row: Sequence[int]) -> list[int]:
        """Return the numbers that nodes read from a rank's row.

        Raises:
            Unsound: the row is shorter.
        """
        for node in nodes:
            if self.read[node] >= len(row):
                raise Unsound(node, f"reads number {self.read[node]} of a rank that has {len(row)}")
        return [row[self.read[node]] for node in nodes]


def find_numbers(program: ExportedProgram, manifest: Manifest, claims: Mapping[fx.Node, Claim]) -> Numbers:
    """Find the tensor with the rank's row of numbers, and the nodes that read from it.

    Raises:
        Unsound: the row has another use, or another claim.
    """
    rows = [node for node, spec in edit.placeholders(program) if spec.target in manifest.rank_numbers]
    own = [user for node in rows for user in node.users]
    read: dict[fx.Node, int] = {}
    for node in own:
        if not (node.target is aten.select.int and node.args[1:] == (0, 0)):
            raise Unsound(node, "takes the numbers of the rank for a tensor of the program")
        for user in node.users:
            index = user.args[2] if user.target is aten.select.int and len(user.args) == 3 else None
            if type(index) is not int or user.args[:2] != (node, 0) or index < 0:
                raise Unsound(user, "takes the numbers of the rank for a tensor of the program")
            read[user] = index
    for node in (*own, *read):
        if (origin := claims.get(node, NO_CLAIM).origin) not in manifest.rank_numbers:
            raise Unsound(node, f"reads the rank's numbers, and claims to stand for {origin!r}")
    return Numbers(read, frozenset([*rows, *own, *read]))


def row_of(manifest: Manifest, rank: int) -> list[int]:
    return next((rows[rank] for rows in manifest.rank_numbers.values()), [])


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
        operands = [node for node in inputs if edit.is_tensor(node)]
        ordered = tuple(find_ordered(nodes, operands[0])) if name.startswith("reshard") and operands else ()
        regions[name] = ProgramRegion(name, tuple(nodes), inputs, outputs, read, ordered=ordered)
    return regions
