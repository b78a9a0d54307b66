"""Changes that are alike are priced once, and as each of them by itself."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from tests.ir.drawn import GRID
from tpcompiler.cost.machine_file import read_machine
from tpcompiler.cost.objective import Objective
from tpcompiler.ir.dim_sharding import WHOLE, DimSharding
from tpcompiler.ir.sharding import Sharding
from tpcompiler.solver.build_problem import price_changes
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
