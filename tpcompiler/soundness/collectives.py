"""Whether all ranks issue the same collectives in an order in which they can meet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx
from torch.export import ExportedProgram

from tpcompiler.ir import edit
from tpcompiler.runtime.artifact import Manifest
from tpcompiler.soundness.folded import Unsound


@dataclass(frozen=True)
class _Call:
    """A collective of one rank: what the others of its group must issue too, and where it stands."""

    group: str
    what: str
    node: fx.Node


def check_collectives(programs: Sequence[ExportedProgram], manifest: Manifest) -> None:
    """Check starts and waits of each rank, and play all ranks' sequences against each other.

    Raises:
        Unsound: a collective without its one wait, over a group that the manifest does not have, or one at which
            others of its group wait for something else: on real devices that hangs, or mixes data up.
    """
    queues = [_sequence(program, manifest, rank) for rank, program in enumerate(programs)]
    at = [0] * len(queues)
    while True:
        heads = [queue[i] if i < len(queue) else None for queue, i in zip(queues, at, strict=True)]
        if not any(heads):
            return
        moved = False
        for rank, head in enumerate(heads):
            if head is None:
                continue
            ranks = next(ranks for ranks in manifest.groups[head.group] if rank in ranks)
            met = [heads[other] for other in ranks]
            if rank == ranks[0] and all(o is not None and o.group == head.group and o.what == head.what for o in met):
                for other in ranks:
                    at[other] += 1
                moved = True
        if not moved:
            _refuse(heads, manifest)


def _refuse(heads: Sequence[_Call | None], manifest: Manifest) -> None:
    for rank, head in enumerate(heads):
        if head is None:
            continue
        for other in next(ranks for ranks in manifest.groups[head.group] if rank in ranks):
            theirs = heads[other]
            if theirs is None or (theirs.group, theirs.what) != (head.group, head.what):
                there = (
                    "at its end" if theirs is None else f"at {theirs.what} over {theirs.group} ('{theirs.node.name}')"
                )
                raise Unsound(
                    head.node, f"is {head.what} over {head.group} on rank {rank}, and rank {other} is {there}"
                )


def _sequence(program: ExportedProgram, manifest: Manifest, rank: int) -> list[_Call]:
    found = []
    for node in edit.calls(program.graph):
        if "wait_tensor" in str(node.target):
            (started,) = node.args
            if not (isinstance(started, fx.Node) and edit.is_collective(started)):
                raise Unsound(node, "waits for what is no collective")
        if not edit.is_collective(node):
            continue
        users = list(node.users)
        if len(users) != 1 or "wait_tensor" not in str(users[0].target):
            raise Unsound(node, f"has {len(users)} users where it needs one, its wait")
        group = str(node.args[-1])
        if not any(rank in ranks for ranks in manifest.groups.get(group, ())):
            raise Unsound(node, f"runs over {group!r}, and the manifest has no such group with rank {rank}")
        found.append(_Call(group, _what(node), node))
    return found


def _what(node: fx.Node) -> str:
    """What the ranks of a group must agree on; the sizes of an all_to_all are each rank's own."""
    kind = str(node.target).split(".")[1]
    value = edit.outputs(edit.operands(node)[0])[0]
    sizes = "" if kind == "all_to_all_single" else f" {list(value.shape)}"
    details = [] if kind == "all_to_all_single" else [str(arg) for arg in node.args[1:-1]]
    return f"{kind}({', '.join([f'{value.dtype}{sizes}', *details])})"
