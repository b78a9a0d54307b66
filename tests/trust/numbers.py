"""Damages of the numbers that tell ranks with one graph apart."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from tests.trust.damage import Artifact, at, kind

Rows = list[list[int]]


def _change(artifact: Artifact, nth: int, change: Callable[[Rows, int], bool], *, also_said: bool) -> bool:
    """Change the rows at the nth number; whether that gives a rank other ones."""
    for name, rows in artifact.manifest.rank_numbers.items():
        number = at(range(len(rows[0])), nth)
        if number is None:
            return False
        new = [list(row) for row in rows]
        if not change(new, number):
            return False
        for rank, row in enumerate(new):
            artifact.put(rank, name, torch.tensor([row]))
        if also_said:
            artifact.manifest.rank_numbers[name] = new
        return True
    return False


def _next(rows: Rows, number: int) -> bool:
    rows[-1][number] += -1 if rows[-1][number] else 1
    return True


def _swap(rows: Rows, number: int) -> bool:
    rows[0][number], rows[-1][number] = rows[-1][number], rows[0][number]
    return rows[0][number] != rows[-1][number]


@kind
def another_number_of_the_rank(artifact: Artifact, nth: int) -> bool:
    """The last rank's slice begins one element earlier, and the manifest says so too."""
    return _change(artifact, nth, _next, also_said=True)


@kind
def another_number_than_the_manifest_says(artifact: Artifact, nth: int) -> bool:
    """The same in the file alone."""
    return _change(artifact, nth, _next, also_said=False)


@kind
def numbers_of_two_ranks_swapped(artifact: Artifact, nth: int) -> bool:
    """The first rank takes the last one's part, and the other way round."""
    return _change(artifact, nth, _swap, also_said=True)


def _reads(artifact: Artifact, rank: int) -> list[fx.Node]:
    names = {f"c_{name}" for name in artifact.manifest.rank_numbers}
    rows = [node for node in artifact.ranks[rank].graph.nodes if node.op == "placeholder" and node.name in names]
    return [user for row in rows for own in row.users for user in own.users]


@kind
def a_number_more_that_one_rank_reads(artifact: Artifact, nth: int) -> bool:
    """Every rank has one number more, and the manifest says so; the last one's graph reads it in another's place."""
    node = at(_reads(artifact, len(artifact.ranks) - 1), nth)
    if node is None:
        return False
    for name, rows in artifact.manifest.rank_numbers.items():
        new = [[*row, row[node.args[2]] + 1] for row in rows]  # type: ignore[index]
        artifact.manifest.rank_numbers[name] = new
        for rank, row in enumerate(new):
            artifact.put(rank, name, torch.tensor([row]))
            for held in artifact.ranks[rank].graph.find_nodes(op="placeholder"):
                if held.name == f"c_{name}":
                    held.meta["val"] = held.meta["val"].new_empty(1, len(row))
                    for own in held.users:
                        own.meta["val"] = held.meta["val"][0]
        node.update_arg(2, len(new[0]) - 1)
    return True
