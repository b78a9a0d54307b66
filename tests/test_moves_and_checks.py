"""Casts, device moves and run-time checks in an export: taken, and still checked on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.export import Dim

import tpcompiler
from tests.bad_input.models import PLAN, Net, X, exported
from tpcompiler.errors import InputsError
from tpcompiler.ir import edit


def cast(self: Any, x: torch.Tensor) -> torch.Tensor:
    h = self.up(x).to(torch.float64).to("cpu", torch.float32).type_as(x).to(x, copy=True)
    return self.down(h.double().float().to(h.device).cpu().contiguous().detach().clone())


def lifted(self: Any, x: torch.Tensor) -> torch.Tensor:
    h = self.up(x)
    return self.down(h * torch.tensor([2.0] * 16).to(h) + torch.arange(16, device=h.device, dtype=h.dtype))


def asserted(self: Any, x: torch.Tensor) -> torch.Tensor:
    torch._assert_async((x.abs() < 100).all())
    h = self.up(x)
    torch._assert_async((h.abs() < 1000).all(), "too large")
    return self.down(h)


def constrained(self: Any, x: torch.Tensor) -> torch.Tensor:
    count = (x[:, 0] > -100).sum().item()
    torch._constrain_as_size(count, 1, 4)
    torch._check(count <= x.shape[0])
    return self.both(x[:count]) + self.both(torch.ones(count, 8))


def sized(self: Any, x: torch.Tensor) -> torch.Tensor:
    torch._check(x.shape[0] > 1)
    assert x.shape[1] == 8
    return self.both(x) * x.shape[0]


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("form", ["training", "canonical", "core"])
@pytest.mark.parametrize("function", [cast, lifted, asserted, constrained, sized])
def test_what_is_taken(function: Callable[..., Any], form: str) -> None:
    program = exported(Net(function), X)
    if form != "training":
        program = program.run_decompositions({} if form == "canonical" else None)
    for world in (2, 4):
        made = tpcompiler.parallelize(program, world, PLAN)
        assert {c.why for c in made.collectives()} <= {"inherent"} or function is asserted
        assert made.verify((X,)).ok


def test_an_assertion_is_still_checked_on_every_rank() -> None:
    """Those without a message too, which torch's own decomposition leaves out."""
    made = tpcompiler.parallelize(exported(Net(asserted), X), 2, PLAN)
    for rank in range(2):
        names = [str(node.target) for node in edit.calls(made.rank_program(rank).graph)]
        assert sum("_assert_async" in name for name in names) == 2
    with pytest.raises(InputsError, match="does not run on these inputs"):
        made.verify((X * 1e6,))


def test_a_check_of_a_dynamic_size_stays() -> None:
    program = exported(Net(sized), X, dynamic_shapes=(((Dim("batch", min=2, max=64), None),),))
    made = tpcompiler.parallelize(program, 2, PLAN, inputs=["S(0)"], outputs=["S(0)"])
    assert made.verify((torch.randn(6, 8),)).ok
