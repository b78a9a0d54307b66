"""Check that all ranks issue the same collectives in an order in which they can meet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import asdict
from torch import fx
from torch.export import ExportedProgram

from tpcompiler.artifact.collective_records import is_exchange, most_sent, transfer_of
from tpcompiler.ir import edit
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.node_placement import read_claim
from tpcompiler.ir.shares import mesh_of
from tpcompiler.judge.sound.unsound import Unsound
from tpcompiler.runtime.artifact import Manifest


class _Call(NamedTuple):
    """A collective of one rank: the part that its group must agree on, its change, its node, and the ranks it meets."""

    group: str
    what: str
    change: str
    node: fx.Node
    ranks: Sequence[int]

    def meets(self, other: _Call | None) -> bool:
        return other is not None and self[:3] == other[:3]

    def __str__(self) -> str:
        return f"{self.what} over {self.group} for {self.change}"


def check_collectives(programs: Sequence[ExportedProgram], manifest: Manifest) -> None:
    """Check starts and waits of each rank, and play all ranks' sequences against each other.

    Raises:
        Unsound: a collective has no wait or several, its group is not in the manifest, or others of its group wait for
            another collective, which hangs or mixes up data on real devices.
    """
    mesh = mesh_of(manifest)
    for name, groups in manifest.groups.items():
        axes = mesh.axes_of(name)
        if not set(axes) <= set(mesh.names) or [list(ranks) for ranks in mesh.groups(axes)] != groups:
            raise Unsound(None, f"the manifest says that group {name!r} has the ranks {groups}")
    queues = [_sequence(program, manifest, rank) for rank, program in enumerate(programs)]
    _check_list(queues, manifest, mesh)
    at = [0] * len(queues)
    while True:
        heads = [queue[i] if i < len(queue) else None for queue, i in zip(queues, at, strict=True)]
        waiting = [(rank, head) for rank, head in enumerate(heads) if head is not None]
        apart = {rank: [other for other in head.ranks if not head.meets(heads[other])] for rank, head in waiting}
        if not waiting:
            return
        for rank in (moving := [rank for rank in apart if not apart[rank]]):
            at[rank] += 1
        if not moving:
            rank, head = waiting[0]
            theirs = heads[other := apart[rank][0]]
            there = "at its end" if theirs is None else f"at {theirs} ('{theirs.node.name}')"
            raise Unsound(head.node, f"is {head} on rank {rank}, and rank {other} is {there}")


def _check_list(queues: Sequence[Sequence[_Call]], manifest: Manifest, mesh: Mesh) -> None:
    """Check the manifest's list against the collectives that ranks call, in order."""
    calls = queues[0]
    said = [(row.kind, mesh.group_name(mesh.read(row.axis))) for row in manifest.collectives]
    for number, call in enumerate(calls):
        if number >= len(said) or not call.what.startswith(said[number][0]) or call.group != said[number][1]:
            listed = " over ".join(said[number]) if number < len(said) else "nothing"
            raise Unsound(call.node, f"is collective {number + 1}, {call}, and the manifest lists {listed}")
        row = manifest.collectives[number]
        known = all(isinstance(size, int) for value in edit.outputs(call.node) for size in value.shape)
        each = [queue[number].node for queue in queues if number < len(queue) and call.meets(queue[number])]
        if known and not is_exchange(call.node):
            each = [call.node]
        elif len(each) < len(queues):  # another finding
            known = False
        sent = {"group_size": mesh.size(mesh.axes_of(call.group))}
        if known:  # an exchange of edges counts as the rank that sends most
            sent = asdict(most_sent([transfer_of(node, mesh, rank) for rank, node in enumerate(each)]))
        if apart := [key for key, value in sent.items() if getattr(row, key) != value]:
            both = f"has {apart[0]}={sent[apart[0]]}, and the manifest says {getattr(row, apart[0])}"
            raise Unsound(call.node, f"is collective {number + 1}: it {both}")
    if len(said) > len(calls):
        raise Unsound(None, f"the manifest lists {len(said)} collectives, and the programs have {len(calls)}")


def _sequence(program: ExportedProgram, manifest: Manifest, rank: int) -> list[_Call]:
    calls = []
    for node in edit.calls(program.graph):
        if edit.is_wait(node):
            if not edit.is_collective(edit.started(node)):
                raise Unsound(node, "waits for what is no collective")
        if not edit.is_collective(node):
            continue
        values = len(edit.outputs(node))
        if len(edit.waits_of(node)) != values or len(node.users) != values:
            needed = "one, its wait" if values == 1 else f"{values}, each result with one wait"
            raise Unsound(node, f"has {len(node.users)} users where it needs {needed}")
        group = str(node.args[-1])
        ranks = next((ranks for ranks in manifest.groups.get(group, ()) if rank in ranks), None)
        if ranks is None:
            raise Unsound(node, f"runs over {group!r}, and the manifest has no such group with rank {rank}")
        if (said := _ranks_said(node)) - {len(ranks)}:
            raise Unsound(node, f"is for {sorted(said)} ranks, and {group!r} has {len(ranks)}")
        calls.append(_Call(group, _what(node), read_claim(node).region or "no change", node, ranks))
    return calls


def _ranks_said(node: fx.Node) -> set[int]:
    """Return the numbers of ranks that the arguments specify, directly or by a list of sizes."""
    kind = str(node.target).split(".")[1]
    if kind == "all_to_all_single":
        return {len(sizes) for sizes in node.args[1:-1]}  # type: ignore[arg-type]
    return {node.args[-2]} if kind in ("all_gather_into_tensor", "reduce_scatter_tensor") else set()  # type: ignore[arg-type]


def _what(node: fx.Node) -> str:
    """Return the part of a call on which a group must agree; the sizes of an all_to_all differ by rank."""
    kind = str(node.target).split(".")[1]
    if not (operands := edit.operands(node)):
        raise Unsound(node, "takes what has no recorded value")
    values = [edit.outputs(operand)[0] for operand in operands]
    if kind == "all_to_all_single":
        return f"{kind}({values[0].dtype})"
    sizes = [f"{value.dtype} {list(value.shape)}" for value in values]
    return f"{kind}({', '.join([*sizes, *map(str, node.args[1:-1])])})"
