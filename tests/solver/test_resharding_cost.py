"""Changes that are alike are priced once, and as each of them by itself."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.ir.drawn import GRID
from tools.bench_convert import export
from tpcompiler.cost.machine_file import read_machine
from tpcompiler.cost.objective import Objective
from tpcompiler.ir.dim_sharding import WHOLE, DimSharding
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.sharding import Sharding
from tpcompiler.passes.apply_plan import apply_plan
from tpcompiler.passes.canonicalize import canonicalize
from tpcompiler.plan.plan import Plan
from tpcompiler.solver import search
from tpcompiler.solver.resharding_cost import price_changes
from tpcompiler.solver.search import PLACING, solve
from tpcompiler.solver.task import Task
from tpcompiler.solver.turn import Memo

OBJECTIVE = Objective.of(read_machine("h100"))
CUTS = [
    *(DimSharding.by(*axes) for axes in ((), ("dp",), ("tp",), ("dp", "tp"), ("tp", "dp"))),
    DimSharding.by("dp", block=4),
    DimSharding.by("tp", unit=2),
]


def placed(ndim: int) -> Iterator[Sharding]:
    """One dim or two cut, by an axis each or both, and what is left pending or not."""
    for dims in itertools.product(CUTS, repeat=2):
        axes = [axis for cut in dims for axis in cut.axes]
        if len(axes) == len(set(axes)):
            yield Sharding((*dims, *(WHOLE,) * (ndim - 2)))
            if "tp" not in axes:
                yield Sharding((*dims, *(WHOLE,) * (ndim - 2)), (("tp", "sum"),))


@pytest.mark.slow
def test_as_by_itself() -> None:
    """Of shapes of as many elements: what divides the dims of one does not divide another's."""
    known = Memo()
    for shape in ((12, 6, 1), (8, 9), (24, 3), (4, 18, 1)):
        tensor = torch.empty(shape)
        have = [own for own in placed(len(shape)) if not any(map(misfit, own.dims, shape))]
        table = price_changes(have, have, tensor, GRID, OBJECTIVE, known)
        for (at, source), (to, target) in itertools.product(enumerate(have), enumerate(have)):
            assert table[at, to] == OBJECTIVE.change_seconds(source, target, tensor, GRID)


def misfit(cut: DimSharding, size: int) -> str:
    return cut.find_misfit(size, GRID)


def test_a_view_is_priced_with_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many bytes, and the last dim gathered: one price, whatever the dims before are."""
    asked = list[Sharding]()

    def priced(objective: Objective, source: Sharding, *others: Any) -> float:
        asked.append(source)
        return 1.0

    monkeypatch.setattr(Objective, "change_seconds", priced)
    mesh, known = Mesh.of(4), Memo()
    for shape in ((4, 8, 16), (32, 16), (8, 4, 16)):
        cut = Sharding.of({"tp": torch.distributed.tensor.Shard(len(shape) - 1)}, mesh, len(shape), "x")
        price_changes([cut] * 3, [Sharding.replicated(len(shape))] * 2, torch.empty(shape), mesh, OBJECTIVE, known)
    assert len(asked) == 1


@pytest.mark.slow
def test_a_mask_of_few_samples_has_no_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two samples on 8 ranks: the dim of a mask is no dim of heads that ranks could share."""
    monkeypatch.setattr(search, "on_split_axis", lambda *_: pytest.fail("the axis was tried as two"))
    program = apply_plan(canonicalize(export(1, dynamic=False)), Plan().with_search(), Mesh.of(8))
    assert solve(Task([program], OBJECTIVE), PLACING).styles["model.layers.0.mlp.down_proj"] == "rowwise"
