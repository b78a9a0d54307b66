"""What a program must know of the rank that runs it, as numbers: where its slices begin, which ids it holds.

They are read from a tensor beside the weights, so that all ranks with equal shapes run one graph.
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
    """A name for the tensor that holds them, beside the leaves of the program."""
    names = {fqn for _, fqn in program.leaves()}
    more = (f"{RANK_NUMBERS}_{i}" for i in itertools.count(1))
    return next(name for name in itertools.chain([RANK_NUMBERS], more) if name not in names)


def rank_number(values: Sequence[int]) -> Any:
    """Graph marker: of these the rank's own, an i64 of no dims. `build_rank_program` makes a look-up of it."""
    return values


fx.wrap("rank_number")


def read_number(graph: fx.Graph, values: Sequence[int], mode: FakeTensorMode) -> fx.Node:
    """The node that gives each rank its own of `values`, which are in the order of the ranks that run the graph."""
    wanted = list(values)
    for node in numbers_read(graph):
        if node.args[0] == wanted:
            return node
    first = next(node for node in graph.nodes if node.op != "placeholder" and node.target is not rank_number)
    made = edit.insert_before(first, rank_number, (wanted,), RANK_NUMBERS[:-1])
    made.meta.clear()
    with mode:
        made.meta["val"] = torch.empty((), dtype=torch.int64)
    return made


def numbers_of_rank(program: LocalProgram, rank: int) -> list[int]:
    """The numbers of one of the ranks that run the program, in the order of `numbers_read`."""
    values: list[Any] = [node.args[0] for node in numbers_read(program.graph)]
    return [each[program.ranks.index(rank)] for each in values]


def numbers_read(graph: fx.Graph) -> list[fx.Node]:
    """All `rank_number` nodes, in order."""
    return graph.find_nodes(op="call_function", target=rank_number)
