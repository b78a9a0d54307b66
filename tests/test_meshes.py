"""Meshes of several axes: layers cut over one, the batch over another."""

from __future__ import annotations

from collections import Counter, OrderedDict
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim, ExportedProgram, export

import tpcompiler
from tests.passes.stages import cuts_are_kept
from tests.sound import findings
from tests.zoo.case import randomise

MACHINE = "ideal"  # as if latencies were none: small models are worth cutting

PLAN = {"q": "colwise", "k": "colwise", "v": "colwise", "o": "rowwise", "up": "colwise", "down": "rowwise"}
X = torch.randn(4, 3, 16)
BATCH: dict[str, Any] = {"inputs": {"x": {"dp": "S(0)"}}, "outputs": [{"dp": "S(0)"}]}


class Layer(nn.Module):
    """Attention of 4 heads and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part(x).unflatten(-1, (4, 4)).transpose(1, 2) for part in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(x)))


@cache
def exported(dynamic: bool = False, core: bool = False) -> ExportedProgram:
    sizes = {"x": {0: Dim("batch", max=64), 1: Dim("tokens", max=64)}} if dynamic else None
    program = export(randomise(Layer()), (X,), dynamic_shapes=sizes)
    return program.run_decompositions() if core else program


def wire(program: tpcompiler.ParallelProgram) -> Counter[tuple[str, str]]:
    counted: Counter[tuple[str, str]] = Counter()
    for c in program.collectives():
        counted[c.kind, c.axis] += c.wire_bytes
    return counted


@pytest.mark.slow
@pytest.mark.sweep(8)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("core", [False, True])
@pytest.mark.parametrize(
    "mesh", [{"dp": 2, "tp": 2}, {"tp": 2, "dp": 2}, {"dp": 2, "tp": 4}, {"dp": 2, "ep": 2, "tp": 2}]
)
def test_two_sums_of_half_the_batch_each(mesh: dict[str, int], core: bool, dynamic: bool) -> None:
    """2 (n - 1) / n of [2, 3, 16] floats over the n ranks of tp, twice a layer, and nothing over dp."""
    program = tpcompiler.parallelize(exported(dynamic, core), mesh, PLAN, **BATCH)
    n = mesh["tp"]
    assert wire(program) == {("all_reduce", "tp"): 2 * 2 * (n - 1) * 2 * 3 * 16 * 4 // n}
    assert [c.kind for c in program.collectives()] == ["all_reduce"] * 2
    report = program.verify((X,), then=[((torch.randn(2, 1, 16),), {})] if dynamic else [])
    assert report.ok, str(report)


def test_styles_speak_of_tp_alone() -> None:
    """A pin of a style over tp leaves the batch as it is cut over dp."""
    program = tpcompiler.parallelize(
        exported(), {"dp": 2, "tp": 2}, {**PLAN, "up": "colwise_gather_output", "down": "replicate"}, **BATCH
    )
    assert {(c.kind, c.axis) for c in program.collectives()} == {("all_reduce", "tp"), ("all_gather", "tp")}
    assert program.verify((X,)).ok


@pytest.mark.slow
def test_one_gather_of_what_both_axes_cut() -> None:
    """The rows lie over both axes: their gather at the end runs over one flattened group."""
    module = nn.Sequential(nn.ReLU(), nn.GELU())
    program = tpcompiler.parallelize(
        export(module, (X,)), {"dp": 2, "tp": 2}, {}, inputs=[{"dp": "S(0)", "tp": "S(0)"}]
    )
    assert program.verify((X,)).ok
    (last,) = program.collectives()
    assert (last.kind, last.axis, last.group_size, last.wire_bytes) == (
        "all_gather",
        "dp.tp",
        4,
        3 * 4 * 3 * 16 * 4 // 4,
    )


@pytest.mark.slow
def test_sums_over_two_axes_are_one_collective() -> None:
    """Rows of a weight over tp, and the features of its input over dp: what is pending over both is reduced at once."""
    program = tpcompiler.parallelize(
        export(randomise(nn.Linear(16, 6, bias=False)), (X,)),
        {"dp": 2, "tp": 2},
        {"weight": {"dp": "S(1)", "tp": "S(1)"}},
    )
    assert [(c.kind, c.axis, c.group_size) for c in program.collectives()] == [("all_reduce", "dp.tp", 4)]
    assert program.verify((X,)).ok


class Both(nn.Module):
    """Ops with a body for each of two dims."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.mean(), x.mean((0, 1)), x.tril(1)


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "kept"), [(4, "d0 is cut by tp"), (5, "d1 is cut by dp")])
def test_ops_with_bodies_of_their_own_for_two_dims_that_are_cut(rows: int, kept: str) -> None:
    """A mean is each rank's share of both dims; for a triangle, which moves along either, one dim is gathered."""
    program = export(Both(), (torch.randn(rows, 6),))
    with cuts_are_kept():
        made = tpcompiler.parallelize(program, {"dp": 2, "tp": 2}, {}, inputs=[{"dp": "S(1)", "tp": "S(0)"}])
    assert made.verify((torch.rand(rows, 6),)).ok  # of randn the mean may be next to nothing, and all rounding
    assert [c.kind for c in made.collectives() if c.why == "inherent"] == ["all_reduce", "all_reduce"]
    assert [c.reason for c in made.collectives() if c.why == "fallback"] == [
        f"tril: dims that have separate bodies would be cut at once; {kept}"
    ]


class Rows(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.reshape(-1, 4) * 2, x.unflatten(1, (-1, 4)).tanh(), x.flatten(1, 2).sin()


@pytest.mark.slow
@pytest.mark.parametrize("free", [(0,), (1,), (0, 1)])
def test_what_is_left_open_of_an_empty_share(free: tuple[int, ...]) -> None:
    """A view of no elements in [-1, 0] might have any number of rows: it is said, though it is dynamic."""
    sizes = dict.fromkeys(free, Dim.AUTO)
    made = tpcompiler.parallelize(
        export(Rows(), (torch.randn(6, 8, 4),), dynamic_shapes=(sizes,)), 3, {}, inputs=["S(2)"]
    )
    assert [node.meta["val"].shape[2] for node in made.converted.partition.local_program(2).user_inputs()] == [0]
    assert findings(made) == []
    for rows, columns in ((6, 8), (5, 8), (6, 12)):
        if (rows == 6 or 0 in free) and (columns == 8 or 1 in free):
            assert made.verify((torch.randn(rows, columns, 4),)).ok


def test_an_axis_that_cuts_nothing_is_reported() -> None:
    """Half of the ranks repeat the others: the report and its notes say so, and how the batch is cut; then it is gone."""
    plan = {"up": "colwise", "down": "rowwise"}
    model = nn.Sequential(OrderedDict(up=nn.Linear(16, 64), act=nn.ReLU(), down=nn.Linear(64, 16)))
    exported = torch.export.export(model, (torch.randn(4, 16),))
    idle = tpcompiler.parallelize(exported, {"dp": 2, "tp": 2}, plan)
    said = [note.text for note in idle.manifest().notes if note.kind == "idle"]
    how = 'to cut the batch, inputs={"input": {"dp": "S(0)"}}, or --input input=dp:S(0)'
    assert said == [f"dp=2: ranks that differ in dp alone compute the same; {how}"]
    assert said[0] in str(idle.report())
    cut = tpcompiler.parallelize(exported, {"dp": 2, "tp": 2}, plan, inputs={"input": {"dp": "S(0)"}})
    assert not [note for note in cut.manifest().notes if note.kind == "idle"]
