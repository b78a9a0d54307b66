"""The rank's numbers that a program reads: the only way in which ranks with one graph may behave differently."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx
from torch.export import ExportedProgram

from tpcompiler._torch import aten
from tpcompiler.ir import edit
from tpcompiler.ir.node_placement import NO_CLAIM, Claim
from tpcompiler.judge.sound.unsound import Unsound
from tpcompiler.runtime.artifact import Manifest


@dataclass(frozen=True)
class Numbers:
    """`read`: node -> index of the number it reads; `nodes`: these and their operands, which the whole lacks."""

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
