"""Sizes that the data decide: several ops may count the same, and their sizes are called the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim, export

import tpcompiler
from tests.trust.damage import Artifact, nodes
from tpcompiler.judge.sound.check import check_programs

Made = tuple[torch.Tensor, ...]


def masked_twice(h: torch.Tensor, x: torch.Tensor) -> Made:
    mask = x > 0
    return h[mask], x[mask], mask.nonzero()


def rows(h: torch.Tensor, x: torch.Tensor) -> Made:
    mask, other = x.sum(-1) > 0, x.sum(-1) < 0
    return mask.nonzero(), h[mask], h[other], other.nonzero(), h[mask] * 2


def of_what_is_cut(h: torch.Tensor, x: torch.Tensor) -> Made:
    mask = h.sum(-1) > 0
    return h[mask], mask.nonzero().squeeze(-1), x[mask]


def different(h: torch.Tensor, x: torch.Tensor) -> Made:
    return h, torch.unique(x), *torch.unique(x, return_inverse=True), torch.unique(x, dim=0), torch.unique(h)


def selected(h: torch.Tensor, x: torch.Tensor) -> Made:
    return torch.masked_select(h, x > 0), torch.masked_select(x, x > 0), (x > 0).nonzero()


OPS = [masked_twice, rows, of_what_is_cut, different, selected]


class Net(nn.Module):
    def __init__(self, forward: Callable[..., Made]) -> None:
        super().__init__()
        self.up, self.made = nn.Linear(8, 12 if forward is not selected else 8), forward
        if forward is masked_twice:
            self.up = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Made:
        return self.made(torch.relu(self.up(x)), x)


def converted(forward: Callable[..., Made], dynamic: bool = False) -> tpcompiler.ParallelProgram:
    sizes = ({0: Dim("rows", min=2, max=64)},) if dynamic else None
    exported = export(Net(forward), (torch.randn(6, 8),), dynamic_shapes=sizes)
    return tpcompiler.parallelize(exported, 2, {"up": "colwise"})


@pytest.mark.sample(1)
@pytest.mark.sweep(2)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("forward", OPS)
def test_ops_that_count_the_same(forward: Callable[..., Made], dynamic: bool, tmp_path: Path) -> None:
    program = converted(forward, dynamic)
    assert program.verify((torch.randn(6, 8),)).ok
    program.save(tmp_path / "out")
    assert "cannot be run" not in str(tpcompiler.open(tmp_path / "out").check())


def test_a_size_that_is_another_s() -> None:
    """The rows of one mask are as many as those of the other, the file says."""
    artifact = Artifact.of(converted(rows))
    for first, other in zip(nodes(artifact, "nonzero"), nodes(artifact, "nonzero_1"), strict=True):
        other.args = first.args
    findings = check_programs(artifact.written(), artifact.manifest).findings
    assert "counts u1, and what it counts is u0" in findings[0]


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("threads", [1, 2])
def test_bags_on_any_number_of_threads(mode: str, threads: int, tmp_path: Path) -> None:
    """Offsets that are none are refused by torch's kernel on two threads, and taken for some on one."""

    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(20, 8))

        def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
            return F.embedding_bag(ids, self.table, offsets, mode=mode)

    example = (torch.randint(20, (9,)), torch.tensor([0, 3, 5]))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        tpcompiler.parallelize(export(Bags(), example), 4, {"table": "S(0)"}).save(tmp_path / "out")
    finally:
        torch.set_num_threads(before)
