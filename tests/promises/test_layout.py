"""Strides: of what a program returns, and of every value inside it."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import fx
from torch.export import ExportedProgram

import tpcompiler
from tests.passes.stages import cuts_are_kept
from tests.promises.models import MLP, NAMES, converted, functional, inputs_of, ranks
from tests.zoo.case import randomise
from tpcompiler.ir.local import local_strides
from tpcompiler.judge.compare.simulate import simulate
from tpcompiler.judge.compare.trial import run_single


def meant(value: torch.Tensor, strides: Sequence[int]) -> list[int]:
    """The strides that say where elements lie: none of a tensor without elements, none of a dim of one element."""
    return [at for at, size in zip(strides, value.shape, strict=True) if size > 1] if value.numel() else []


def single(name: str) -> list[torch.Tensor]:
    return run_single(functional(name), inputs_of(name, 1)[0]).outputs


@pytest.mark.sample(2)
@pytest.mark.sweep(5)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_outputs_have_the_strides_of_the_single_device(name: str, world: int) -> None:
    """The same where replicated; where cut dense, in the same order of dims in memory."""
    for result in simulate(ranks(name, world), inputs_of(name, world)):
        for want, got in zip(single(name), result.outputs, strict=True):
            strides = want.stride() if got.shape == want.shape else local_strides(want, got.shape)
            assert meant(got, got.stride()) == meant(got, strides)


@pytest.mark.slow
def test_these_outputs_have_every_layout() -> None:
    """Without them the test above would say nothing: channels_last, permuted, expanded, cut and whole."""
    h, y, *_ = single("conv")
    assert h.is_contiguous(memory_format=torch.channels_last)
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert [t.stride() for t in single("views")] == [(1, 12, 4), (3, 1, 0), (6, 18, 1), (1, 18, 6)]
    assert {c.kind for c in converted("views", 2).collectives()} == {"all_reduce", "all_gather"}
    cut = simulate(ranks("views_cut", 2), inputs_of("views_cut", 2))[0].outputs
    assert [t.stride() for t in cut[2:]] == [(3, 9, 1), (1, 9, 3)]


def misplaced(programs: Sequence[ExportedProgram], name: str) -> list[str]:
    """The values that do not lie in memory as the graph says (`node.meta["val"]`)."""
    found = []

    def keep(rank: int, node: fx.Node, value: object) -> None:
        if isinstance(value, torch.Tensor):
            says = node.meta["val"]
            same = says.shape == value.shape and says.dtype == value.dtype
            if not same or meant(value, says.stride()) != meant(value, value.stride()):
                found.append(f"rank {rank}: {node.name}")

    simulate(programs, inputs_of(name, len(programs)), seen=keep)
    return found


@pytest.mark.sample(2)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    "name", [name for name in NAMES if "dynamic" not in str(name)]
)  # a symbolic stride is no number
def test_values_are_what_the_graph_says(name: str, world: int) -> None:
    assert misplaced(ranks(name, world), name) == []


@pytest.mark.slow
def test_a_weight_in_another_order_is_seen() -> None:
    """Negative control: a cut weight of channels_last that is stored row-major."""
    first, second = ranks("conv", 2)
    second = copy.deepcopy(second)
    weight = second.state_dict["b.weight"]
    second.state_dict["b.weight"] = torch.nn.Parameter(weight.detach().contiguous())
    assert misplaced([first, second], "conv")[0] == "rank 1: p_b_weight"


def test_a_view_with_holes_comes_back_dense() -> None:
    """Not promised: what is gathered of a cut value has neither the rows between nor one row for all."""

    class Holes(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = torch.nn.Linear(4, 6)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = self.up(x)
            return y[:, ::2], y.expand(5, 2, 3, 6)

    x = torch.randn(2, 3, 4)
    with cuts_are_kept():
        program = tpcompiler.parallelize(torch.export.export(randomise(Holes()), (x,)), 2, {"up": MLP["up"]})
    got = simulate([program.rank_program(rank) for rank in range(2)], [[x], [x]])[0].outputs
    assert program.verify((x,)).ok
    assert [value.stride() for value in program.only.original().module()(x)] == [(18, 12, 1), (0, 18, 6, 1)]
    assert [value.stride() for value in got] == [(12, 6, 1), (36, 18, 6, 1)]
