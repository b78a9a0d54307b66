"""All ranks in lock step, in one process; ranks that do not go together are found out."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import ExportedProgram, export

import tpcompiler
from tests.verify.network import collectives, damaged
from tpcompiler.errors import ArtifactError, InputsError
from tpcompiler.judge.compare.simulate import simulate
from tpcompiler.runtime.inputs import flatten_inputs

X = torch.randn(4, 6)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(x.sum())
        return self.down(torch.relu(self.up(x)))


def programs(degree: int = 2, **kwargs: Any) -> list[ExportedProgram]:
    made = tpcompiler.parallelize(export(Mlp(), (X,)), degree, {"up": "colwise", "down": "rowwise"}, **kwargs)
    return [made.rank_program(rank) for rank in range(degree)]


def test_every_value_is_shown() -> None:
    shown: dict[int, list[str]] = {0: [], 1: []}
    ranks = programs()
    simulate(ranks, [[X], [X]], seen=lambda rank, node, value: shown[rank].append(node.name))
    assert shown[0] == shown[1] == [node.name for node in ranks[0].graph.nodes if node.op != "output"]


def error(ranks: list[ExportedProgram]) -> str:
    with pytest.raises(ArtifactError) as caught:
        simulate(ranks, [[X]] * len(ranks))
    return str(caught.value)


def change_argument(program: ExportedProgram, at: int, value: Any) -> ExportedProgram:
    """The program with another argument of its only collective."""
    made = copy.deepcopy(program)
    (name,) = collectives(made)
    node = next(node for node in made.graph.nodes if node.name == name)
    node.update_arg(at, value)
    return made


HELP = "\n  help: the written programs do not belong together; convert the model again"


def test_a_rank_that_skips_a_collective() -> None:
    first, second = programs()
    (name,) = collectives(second)
    second = damaged(second, name, lambda graph, node: node.args[0])
    second.graph.eliminate_dead_code()
    for node in list(second.graph.nodes):
        if node.name == name and not node.users:
            second.graph.erase_node(node)
    assert error([first, second]) == (
        "ranks disagree: rank 0 is at all_reduce(torch.float32, sum, tp=2:tp) ('all_reduce'), rank 1 at the end" + HELP
    )


@pytest.mark.slow
def test_ranks_at_different_collectives() -> None:
    whole, parts = programs(), programs(outputs=["S(0)"])
    assert error([whole[0], parts[1]]) == (
        "ranks disagree: rank 0 is at all_reduce(torch.float32, sum, tp=2:tp) ('all_reduce'), "
        "rank 1 at reduce_scatter_tensor(torch.float32, sum, 2, tp=2:tp) ('reduce_scatter_tensor')" + HELP
    )


def test_ranks_that_reduce_differently() -> None:
    first, second = programs()
    assert "all_reduce(torch.float32, max, tp=2:tp)" in error([first, change_argument(second, 1, "max")])


def test_ranks_of_different_groups() -> None:
    first, second = programs()
    assert "all_reduce(torch.float32, sum, other)" in error([first, change_argument(second, 2, "other")])


@pytest.mark.slow
def test_ranks_with_different_dtypes() -> None:
    first, second = programs()
    (name,) = collectives(second)
    operand = next(node for node in second.graph.nodes if node.name == name).args[0].name
    double = damaged(second, operand, lambda graph, node: graph.call_function(torch.Tensor.double, (node,)))
    assert "all_reduce(torch.float64, sum, tp=2:tp)" in error([first, double])


def test_ranks_with_different_shapes() -> None:
    with pytest.raises(ArtifactError, match=r"'all_reduce' \(all_reduce\) has shapes \[\(4, 6\), \(5, 6\)\]"):
        simulate(programs(), [[X], [torch.randn(5, 6)]])


class Same(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def test_an_exchange_whose_sizes_do_not_meet() -> None:
    made = tpcompiler.parallelize(export(Same(), (torch.randn(4, 6),)), 2, {}, inputs=["S(0)"], outputs=["S(1)"])
    first, second = (made.rank_program(rank) for rank in range(2))
    shares = [[torch.randn(2, 6)], [torch.randn(2, 6)]]
    assert len(simulate([first, second], shares)) == 2
    with pytest.raises(ArtifactError, match=r"on rank 1 expects \[0, 1\], is sent \[1, 1\]"):
        simulate([first, change_argument(second, 1, [0, 1])], shares)


class Named(nn.Module):
    def forward(self, x: torch.Tensor, *, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        return x * scale + shift


def test_inputs_are_flattened_in_the_programs_order() -> None:
    a, b, c = (torch.full((2,), float(n)) for n in range(3))
    program = export(Named(), (a,), {"scale": b, "shift": c})
    assert [v[0].item() for v in flatten_inputs(program, (a,), {"shift": c, "scale": b})] == [0.0, 1.0, 2.0]
    with pytest.raises(
        InputsError, match=r"keyword argument 'shift' is missing\n  help: call it as \(x, scale=..., shift=...\)"
    ):
        flatten_inputs(program, (a,), {"scale": b})
    with pytest.raises(InputsError, match=r"the program takes 3 inputs, got 4"):
        flatten_inputs(program, (a, a), {"scale": b, "shift": c})
