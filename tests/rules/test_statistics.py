"""Norms over samples, pixels or channels that are sharded: the ranks exchange two numbers per channel or group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim, export

import tpcompiler
from tests.compared import compare
from tests.trust.damage import Artifact, inserted
from tests.zoo.case import randomise
from tpcompiler.judge.sound.check import check_programs
from tpcompiler.parallel.program_subject import layout_of
from tpcompiler.rules import statistics

aten = torch.ops.aten
CHANNELS, GROUPS, ITEM = 16, 4, 4
NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch": lambda: nn.BatchNorm2d(CHANNELS),
    "batch, no running statistics": lambda: nn.BatchNorm2d(CHANNELS, affine=False, track_running_stats=False),
    "instance": lambda: nn.InstanceNorm2d(CHANNELS, affine=True),
    "instance, running statistics": lambda: nn.InstanceNorm2d(CHANNELS, track_running_stats=True),
    "group": lambda: nn.GroupNorm(GROUPS, CHANNELS),
}
BATCH, ROWS = 0, 2


def normed(norm: str, mean: float = 100.0) -> nn.Module:
    """A net whose activations have a mean that is large next to their deviation."""
    net = nn.Sequential(nn.Conv2d(3, CHANNELS, 1), NORMS[norm](), nn.ReLU(), nn.Conv2d(CHANNELS, 3, 1))
    randomise(net)
    with torch.no_grad():
        net[0].bias += mean  # type: ignore[operator]
    return net.train()


def converted(
    net: nn.Module, x: torch.Tensor, cut: Mapping[str, int], mesh: Mapping[str, int], machine: str = "ideal", **how: Any
) -> tpcompiler.ParallelProgram:
    at = {axis: f"S({dim})" for axis, dim in cut.items()}
    return tpcompiler.parallelize(export(net, (x,), **how), dict(mesh), {}, inputs=[at], outputs=[at], machine=machine)


def sent(program: tpcompiler.ParallelProgram) -> list[tuple[str, int]]:
    return [(each.kind, each.payload_bytes) for each in program.collectives()]


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize(
    ("norm", "dim", "numbers"),
    [
        ("batch", BATCH, CHANNELS),
        ("batch", ROWS, CHANNELS),
        ("batch, no running statistics", BATCH, CHANNELS),
        ("instance", ROWS, 12 * CHANNELS),  # 12 samples
        ("group", ROWS, 12 * GROUPS),
    ],
)
def test_two_numbers(norm: str, dim: int, numbers: int, world: int) -> None:
    """Equal shares are gathered in one step or reduced in two; a ring reduces with twice the bytes of a gather."""
    x = torch.randn(12, 3, 12, 20)  # of fewer pixels, an all_to_all of all of them to whole samples is faster
    program = converted(normed(norm), x, {"cp": dim}, {"cp": world})
    gathered, reduced = [("all_gather", 2 * numbers * ITEM * world)], [("all_reduce", numbers * ITEM)] * 2
    assert sent(program) in (gathered, reduced)
    wire = sum(each.wire_bytes for each in program.collectives())
    assert wire == min(2 * numbers * ITEM * (world - 1), 2 * numbers * ITEM * 2 * (world - 1) // world)
    assert program.verify((x,), then=[((x.sin(),), {})]).ok


@pytest.mark.slow
@pytest.mark.parametrize("dim", [BATCH, ROWS])
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_shares_of_several_sizes_reduce_the_mean_first(norm: str, dim: int) -> None:
    x = torch.randn(7, 3, 7, 5)
    program = converted(normed(norm), x, {"cp": dim}, {"cp": 3})
    numbers = {"batch": CHANNELS, "group": 7 * GROUPS}[norm]
    assert sent(program) == ([("all_reduce", numbers * ITEM)] * 2 if (norm, dim) != ("group", BATCH) else [])
    assert program.verify((x,)).ok


@pytest.mark.slow
def test_an_empty_share() -> None:
    x = torch.randn(3, 3, 4, 5)
    program = converted(normed("batch"), x, {"dp": BATCH}, {"dp": 4})
    assert sent(program) == [("all_reduce", CHANNELS * ITEM)] * 2
    assert program.verify((x,), then=[((x.sin(),), {})]).ok


@pytest.mark.sample(2)
@pytest.mark.sweep
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dim", [BATCH, ROWS])
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("size", [4, 6, 7, 9])
def test_all_sizes_and_ranks(norm: str, dim: int, world: int, size: int) -> None:
    shape = [2, 3, 2, 5]
    shape[dim] = size
    x = torch.randn(shape)
    program = converted(normed(norm), x, {"cp": dim}, {"cp": world})
    report = program.verify((x,), then=[((2 * x.sin(),), {})])
    assert report.ok, str(report)


@pytest.mark.sample(1)
@pytest.mark.parametrize("cut", [{"dp": BATCH, "tp": ROWS}, {"dp": BATCH, "tp": BATCH}, {"dp": BATCH}], ids=str)
@pytest.mark.parametrize("shape", [(8, 3, 8, 4), (7, 3, 5, 4)], ids=str)
def test_two_axes(shape: tuple[int, ...], cut: dict[str, int]) -> None:
    x = torch.randn(shape)
    program = converted(normed("batch"), x, cut, {"dp": 2, "tp": 2})
    assert sum(each.wire_bytes for each in program.collectives()) <= 4 * 2 * CHANNELS * ITEM
    assert program.verify((x,), then=[((x.sin(),), {})]).ok


@pytest.mark.slow
def test_samples_that_are_merged_with_cut_steps() -> None:
    """A rank holds a part of each sample's steps, which is no piece of the merged dim: two reductions."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.norm, self.down = nn.Linear(8, CHANNELS), nn.BatchNorm1d(CHANNELS), nn.Linear(CHANNELS, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.up(x)
            return self.down(self.norm(h.flatten(0, 1)).view_as(h))  # type: ignore[no-any-return]

    x = torch.randn(4, 64, 8)
    program = converted(randomise(Net()).train(), x, {"cp": 1}, {"cp": 2})
    assert sent(program) == [("all_reduce", CHANNELS * ITEM)] * 2
    assert program.verify((x,)).ok


@pytest.mark.slow
def test_a_dynamic_batch_is_counted() -> None:
    """The unbiased variance needs the number of samples of all ranks: one more number, in float64."""
    x, sizes = torch.randn(8, 3, 4, 4), ({0: 2 * Dim("half", min=2, max=64)},)
    program = converted(normed("batch"), x, {"dp": BATCH}, {"dp": 2}, dynamic_shapes=sizes)
    assert sent(program) == [("all_reduce", 8), ("all_gather", 2 * CHANNELS * ITEM * 2)]
    for samples in (8, 12):
        assert program.verify((torch.randn(samples, 3, 4, 4),)).ok


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = normed("batch", mean=0.0)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.net(x), target)


def test_gradients() -> None:
    """A training step sends two numbers per channel forward, and two backward, which are gradients too.

    The other gradients are summed in one collective.
    """
    x, y = torch.randn(2, 12, 3, 4, 4)
    rows = {"dp": "S(0)"}
    program = tpcompiler.parallelize(
        tpcompiler.export_training(Regression(), (x, y)), {"dp": 2}, {}, inputs={"x": rows, "target": rows}
    )
    assert program.verify((x, y)).ok
    forward, loss = [CHANNELS * ITEM] * 2, [ITEM]
    first, norm, second = (
        [n * CHANNELS * ITEM for n in (3, 1)],
        [CHANNELS * ITEM] * 2,
        [3 * CHANNELS * ITEM, 3 * ITEM],
    )
    assert Counter(sent(program)) == Counter(("all_reduce", n) for n in [*forward, *loss, *norm, sum(first + second)])


def own_statistics_only(artifact: Artifact) -> None:
    """Every rank takes its own numbers for those of all."""
    for program in artifact.ranks:
        (wait,) = (n for n in program.graph.nodes if "wait_tensor" in str(n.target))
        share = wait.args[0].args[0]
        alone = inserted(wait.next, aten.cat.default, ([share, share],), wait)
        alone.meta["custom"] = {**wait.meta["custom"]}
        wait.replace_all_uses_with(alone, delete_user_cb=lambda user, alone=alone: user is not alone)
        program.graph_module.recompile()


@pytest.mark.slow
def test_the_statistics_of_one_rank_are_noticed() -> None:
    """The negative control, for `verify` and for `check`."""
    x = torch.randn(8, 3, 4, 4)
    program = converted(normed("batch"), x, {"dp": BATCH}, {"dp": 2})
    artifact = Artifact.of(program).copied()
    assert check_programs(artifact.written(), artifact.manifest).findings == []
    own_statistics_only(artifact)
    assert check_programs(artifact.written(), artifact.manifest).findings
    names = [spec.name for spec in program.manifest().outputs]
    report = compare(program.only.original(), artifact.ranks, (x,), {}, layout_of(program.only), ["input"], names)
    assert not report.ok


@pytest.mark.slow
def test_a_variance_without_the_distance_between_ranks_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def average(x: torch.Tensor, dims: Any, pieces: Any) -> tuple[torch.Tensor, torch.Tensor]:
        parts = aten.unflatten.int(x, 0, [2, -1])
        variance, mean = torch.var_mean(parts, [1, 3, 4], correction=0, keepdim=True)
        return mean.mean(0), variance.mean(0)

    monkeypatch.setattr(statistics, "find_moments", average)
    x = torch.randn(8, 3, 4, 4)
    assert not converted(normed("batch"), x, {"dp": BATCH}, {"dp": 2}).verify((x,)).ok
