"""Parameters and buffers in one memory: refused where a change of one would not reach the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tpcompiler
from tests.passes.stages import Call
from tpcompiler.errors import ProgramError, ShardingError
from tpcompiler.ir.shared_memory import find_shared

X = torch.randn(4, 8)


def transposed() -> Any:
    model = Call(lambda self, x: self.b(torch.tanh(self.a(x))).square().mean(), a=nn.Linear(8, 8), b=nn.Linear(8, 8))
    model.b.weight.data = model.a.weight.data.t()  # type: ignore[union-attr, operator]
    return model


def part() -> Any:
    """A parameter that is the first rows of another, with columns of a third next to it, which is another memory."""
    base, columns = torch.randn(16, 8), torch.randn(8, 16)
    return Call(
        lambda self, x: (
            (torch.tanh(x @ self.w.t()) @ torch.cat([self.u, self.u]) + x @ self.y @ self.z).square().mean()
        ),
        w=nn.Parameter(base),
        u=nn.Parameter(base[:8]),
        y=nn.Parameter(columns[:, :8]),
        z=nn.Parameter(columns[:, 8:]),
    )


def view_of_weight() -> Any:
    model = transposed()
    model.b = nn.Linear(8, 8)
    model.register_buffer("mean", model.a.weight.detach()[0])
    model.forward = (lambda run: lambda x: run(x + model.mean))(model.forward)
    return model


@pytest.mark.parametrize(
    ("make", "plan", "names"),
    [
        (transposed, {"a": "colwise", "b": "rowwise"}, r"'a\.weight' \[8, 8\] and 'b\.weight' \[8, 8\]"),
        (part, {"w": "S(0)"}, r"'u' \[8, 8\] and 'w' \[16, 8\]"),
        (part, {"y": "S(0)"}, ""),
        (
            view_of_weight,
            {"a": "colwise"},
            r"'a\.weight' \[8, 8\] and 'mean' \[8\]|'mean' \[8\] and 'a\.weight' \[8, 8\]",
        ),
        (transposed, {}, ""),
    ],
)
def test_shares_of_one_memory(make: Any, plan: dict[str, str], names: str) -> None:
    program = tpcompiler.export_training(make(), (X,))
    if not names:
        assert tpcompiler.parallelize(program, 2, plan).verify((X,)).ok
        return
    with pytest.raises(ShardingError, match=rf"({names}) share memory, .* is sharded as S\(0\)"):
        tpcompiler.parallelize(program, 2, plan)


def test_inference_reads_shares_of_one_memory() -> None:
    program = torch.export.export(transposed(), (X,))
    assert tpcompiler.parallelize(program, 2, {"a": "colwise", "b": "rowwise"}).verify((X,)).ok


def test_two_parameters_in_one_memory() -> None:
    model = transposed()
    model.b.weight.data = model.a.weight.data
    with pytest.raises(ProgramError, match=r"'a\.weight' and 'b\.weight' are two parameters in one memory"):
        tpcompiler.export_training(model, (X,))
    model.b.weight = model.a.weight
    tpcompiler.export_training(model, (X,))


@pytest.mark.parametrize("other", [lambda base: base, lambda base: base[:], lambda base: base[4:12]])
def test_buffers_in_one_memory_that_are_written(other: Any) -> None:
    base = torch.zeros(16)

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.one.add_(1.0)
        return (self.a(x).sum(0) + self.two[:8]).square().mean()

    model = Call(forward, a=nn.Linear(8, 8), one=base)
    model.register_buffer("two", other(base))
    with pytest.raises(ProgramError, match=r"writes to memory that '(one|two)' \[\d+\] and '(one|two)' \[\d+\] share"):
        tpcompiler.export_training(model, (X,))


def test_tensors_with_common_elements() -> None:
    base = torch.zeros(8, 8)
    values = {
        "rows": base[:4],
        "later rows": base[4:],
        "even": base[:, ::2],
        "odd": base[:, 1::2],
        "expanded": base[5, :1].expand(3),
        "own": torch.zeros(4),
        "nothing": base[:0],
    }
    shared = {frozenset(pair) for pair in find_shared(values)}
    wanted = [("rows", "even"), ("rows", "odd"), ("later rows", "even"), ("later rows", "odd")]
    assert shared == {frozenset(pair) for pair in [*wanted, ("later rows", "expanded"), ("even", "expanded")]}
