"""Numbers that differ between ranks: where a rank's slices begin, and which ids it holds.

They are read from a tensor stored with the weights, so that all ranks with equal shapes run one graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from tpcompiler._torch import FakeTensorMode
from tpcompiler.ir import edit

if TYPE_CHECKING:
    from tpcompiler.ir.program import LocalProgram, Program

RANK_NUMBERS = "rank_numbers"


def name_rank_numbers(program: Program) -> str:
    """Return a name for the tensor of rank numbers that no leaf of the program has."""
    names = {fqn for _, fqn in program.leaves()}
    more = (f"{RANK_NUMBERS}_{i}" for i in itertools.count(1))
    return next(name for name in itertools.chain([RANK_NUMBERS], more) if name not in names)


def rank_number(values: Sequence[int]) -> Any:
    """Mark in the graph the rank's own number of `values`, an i64 of no dims, which becomes a look-up at the end."""
    return values


fx.wrap("rank_number")


def read_number(graph: fx.Graph, values: Sequence[int], mode: FakeTensorMode) -> fx.Node:
    """Return the node that gives each rank its own of `values`, ordered as the ranks that run the graph."""
    numbers = list(values)
    for node in numbers_read(graph):
        if node.args[0] == numbers:
            return node
    first = next(node for node in graph.nodes if node.op != "placeholder" and node.target is not rank_number)
    call = edit.insert_before(first, rank_number, (numbers,), RANK_NUMBERS[:-1])
    call.meta.clear()
    with mode:
        edit.record(call, torch.empty((), dtype=torch.int64))
    return call


def numbers_of_rank(program: LocalProgram, rank: int) -> list[int]:
    """Return the numbers of one rank that runs the program, in the order of `numbers_read`."""
    values: list[Any] = [node.args[0] for node in numbers_read(program.graph)]
    position = program.ranks.index(rank)
    return [each[position] for each in values]


def numbers_read(graph: fx.Graph) -> list[fx.Node]:
    """Return all `rank_number` nodes, in order."""
    return graph.find_nodes(op="call_function", target=rank_number)
