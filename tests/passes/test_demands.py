"""A gather that the boundary demands anyway is no fallback."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import export

import tpcompiler
from tests.passes.stages import Call
from tests.zoo.case import randomise
from tpcompiler.errors import BudgetError

X = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
Forward = Callable[[Any, torch.Tensor], Any]
BOUNDARY = "outputs are R unless outputs= says otherwise"
ANYWAY = f"softmax: it needs the dim of 12 whole, which is also asked for ({BOUNDARY})"


def converted(forward: Forward, outputs: list[str | None] | None = None) -> tpcompiler.ParallelProgram:
    module = randomise(Call(lambda self, x: forward(self, self.head(x)), head=nn.Linear(8, 12), down=nn.Linear(12, 8)))
    return tpcompiler.parallelize(export(module, (X,)), 2, {"head": "colwise"}, outputs=outputs)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (lambda self, z: (z, z.argmax(-1)), BOUNDARY),
        (lambda self, z: (z.argmax(-1), z), BOUNDARY),
        (lambda self, z: (z, z.topk(3, -1)), BOUNDARY),
        (lambda self, z: (z, self.down(z.sort(-1).values)), BOUNDARY),
        (lambda self, z: z.softmax(-1), ANYWAY),
        (lambda self, z: (z.softmax(-1), z.argmax(-1)), ANYWAY),
        (lambda self, z: z.softmax(-1) * 2, ANYWAY),
        (lambda self, z: z.sort(-1).values.double(), ANYWAY.replace("softmax", "sort")),
    ],
)
def test_no_fallback(forward: Forward, reason: str) -> None:
    program = converted(forward)
    assert program.verify((X,)).ok
    (gather,) = program.collectives()
    assert (gather.kind, gather.why, gather.reason) == ("all_gather", "plan-demanded", reason)
    program.check_budget(["0 fallbacks"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("forward", "outputs"),
    [
        (lambda self, z: self.down(z.sort(-1).values), None),
        (lambda self, z: z.topk(3, -1).values, None),  # the result is smaller than what is gathered
        (lambda self, z: z.sort(-1).values.half(), None),  # and so it is here
        (lambda self, z: z.sort(-1).values.sum(-1), None),
        (lambda self, z: (z, z.sort(-1).values), ["S(2)", "S(2)"]),
        (lambda self, z: (z, z.sort(-1).values.sum(-1)), ["S(2)", None]),
    ],
)
def test_a_fallback(forward: Forward, outputs: list[str | None] | None) -> None:
    """Negative control: the boundary takes shares, or less than the op needs, which gets whole lines of some rows."""
    program = converted(forward, outputs)
    assert program.verify((X,)).ok
    assert "fallback" in {c.why for c in program.collectives()}
    with pytest.raises(BudgetError):
        program.check_budget(["0 fallbacks"])
