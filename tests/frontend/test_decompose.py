"""Calls are decomposed one by one where that is the same as torch's trace of the whole program."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim, ExportedProgram, export

import tpcompiler
from tests.passes.stages import Call
from tests.sound import findings
from tpcompiler._torch import decomposing
from tpcompiler.errors import ProgramError
from tpcompiler.frontend.decompose import NotSimple, decompose_calls
from tpcompiler.frontend.kernel_differences import spell_out
from tpcompiler.frontend.written_back import keep_old_values
from tpcompiler.ir import edit
from tpcompiler.passes.canonicalize import canonicalize
from tpcompiler.rules.registry import ops_with_rules

SIMPLE: dict[str, Callable[..., Any]] = {}
WHOLE: dict[str, Callable[..., Any]] = {}


def simple(case: Callable[..., Any]) -> Callable[..., Any]:
    SIMPLE[case.__name__] = case
    return case


def whole(case: Callable[..., Any]) -> Callable[..., Any]:
    WHOLE[case.__name__] = case
    return case


@simple
def written_before_and_after_it_is_read(self: Any, x: torch.Tensor) -> Any:
    y = x + 1
    z = y * 2
    y.mul_(3)
    return y + z, y


@simple
def through_another_name(self: Any, x: torch.Tensor) -> Any:
    y = x + 1
    same = y.to(torch.float32)  # gives back what it takes
    same.add_(1)
    return y * 2


@simple
def one_of_several_results(self: Any, x: torch.Tensor) -> Any:
    values, places = x.topk(2)
    values /= values.sum(-1, keepdim=True)
    return values, places


@simple
def a_view_made_afterwards(self: Any, x: torch.Tensor) -> Any:
    y = x.exp()
    y.add_(1)
    return y.view(-1)


@simple
def buffers_that_are_copied_and_counted(self: Any, x: torch.Tensor) -> Any:
    self.one.copy_(x[0, 0])
    self.two.copy_(self.one)
    self.one.add_(1)
    return x + self.one - self.two


@simple
def a_buffer_returned_as_it_was(self: Any, x: torch.Tensor) -> Any:
    before = self.one * 1
    self.one.add_(x.sum())
    return before, self.one + x


@simple
def a_buffer_put_back_as_it_was(self: Any, x: torch.Tensor) -> Any:
    self.two.copy_(self.one)
    self.one.add_(x.sum())
    made = self.one * 2
    self.one.copy_(self.two)
    self.two.add_(1)
    return made, self.one


@simple
def without_gradients(self: Any, x: torch.Tensor) -> Any:
    with torch.no_grad():
        y = torch.nn.functional.glu(x.exp())
    return torch.dropout(y, 0.5, False) * 2


@simple
def zeros_of_either_sign(self: Any, x: torch.Tensor) -> Any:
    return (
        torch.special.xlog1py(x, 0.0),
        1 / torch.nn.functional.threshold(x, 9.0, 0.0),
        1 / torch.nn.functional.threshold(x, 9.0, -0.0),
    )


@simple
def the_output_of_a_dropout_that_drops_nothing(self: Any, x: torch.Tensor) -> Any:
    y = x + 1
    z = torch.dropout(y, 0.5, False)
    z.mul_(2)
    return y - 1, z


@simple
def a_view_that_sees_what_is_written(self: Any, x: torch.Tensor) -> Any:
    y = x + 1
    row = y[0]
    corner, column = row[1:3], y.t()[0]
    y.add_(1)
    column = column * 2
    row.mul_(3)
    return row * 2, corner, column, y


@simple
def a_view_that_is_written(self: Any, x: torch.Tensor) -> Any:
    y = x + 1
    before = y[0].clone()
    y[0].zero_()
    y[:, 1:-1] = y[:, :1]
    return y * 2, before


@simple
def a_view_that_is_written_and_returned(self: Any, x: torch.Tensor) -> Any:
    y = x + 1
    column = y[1:, 2]
    first = column[:1] + 1
    return column.add_(1), column.mul_(2), first, y[1]


@simple
def columns_one_after_the_other(self: Any, x: torch.Tensor) -> Any:
    y = x * 1
    for at in range(1, 4):
        y[:, at] = y[:, at].clone() + (y[:, :at].clone() * y[:, at - 1 : at]).sum(1)
        self.one[...] = y[1, at]
    return y


@simple
def a_view_of_a_buffer(self: Any, x: torch.Tensor) -> Any:
    self.mean[1:3] = x[0, 1:3]
    self.mean[2:].add_(x[1, 2:])
    return x + self.mean


@whole
def a_view_that_may_be_a_copy(self: Any, x: torch.Tensor) -> Any:
    y = x + 1
    same, other = y.reshape(-1), y.t().reshape(-1)
    y[0].add_(1)
    return same * 2, other * 3


@whole
def a_diagonal_that_is_written(self: Any, x: torch.Tensor) -> Any:
    y = x + 1
    y.diagonal().zero_()
    return y * 2


@whole
def a_view_from_below_a_switch(self: Any, x: torch.Tensor) -> Any:
    y = x + 1
    with torch.no_grad():
        row = y[0]
    y.add_(1)
    return row * 2


@whole
def a_view_of_its_second_operand(self: Any, x: torch.Tensor) -> Any:
    a, b = x + 1, x[0] * 2
    _, q = torch.broadcast_tensors(a, b)
    b.add_(1)
    return q * 2


@whole
def such_a_view_from_below_a_switch(self: Any, x: torch.Tensor) -> Any:
    a, b = x[0] + 1, x[:, 0] * 2
    with torch.no_grad():
        _, q = torch.meshgrid(a, b, indexing="ij")
    b.add_(1)
    return q * 2


@whole
def another_tensor(self: Any, x: torch.Tensor) -> Any:
    y, z = x + 1, x * 2
    y.set_(z)
    z.add_(1)
    return y * 1


@whole
def another_dtype(self: Any, x: torch.Tensor) -> Any:
    y = (x > 0).to(torch.int32)
    y.mul_(torch.ones((), dtype=torch.int64))
    y.bitwise_and_(3)
    z = x.half()
    z.add_(x)
    return y, z


@whole
def statistics(self: Any, x: torch.Tensor) -> Any:
    return torch.nn.functional.batch_norm(x, self.mean, self.var, training=True)


def program_of(case: Callable[..., Any], dynamic: bool) -> ExportedProgram:
    names = {"one": torch.zeros(()), "two": torch.zeros(()), "mean": torch.zeros(6), "var": torch.ones(6)}
    module = Call(case, **names)
    shapes = {"x": {0: Dim("rows", min=2, max=64)}} if dynamic else None
    return export(module, (torch.randn(4, 6),), dynamic_shapes=shapes)


def decomposed(program: ExportedProgram) -> ExportedProgram:
    program = spell_out(program)
    with decomposing(program, set(ops_with_rules()), {}) as tables:
        return keep_old_values(decompose_calls(program, *tables))


def run(program: ExportedProgram, xs: list[torch.Tensor]) -> list[Any]:
    module = copy.deepcopy(program.module())  # buffers of its own
    return [[v.clone() for v in torch.utils._pytree.tree_leaves(module(x))] for x in xs]


@pytest.mark.sample(4)
@pytest.mark.sweep
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("case", SIMPLE)
def test_the_same_numbers_call_after_call(case: str, dynamic: bool) -> None:
    program = program_of(SIMPLE[case], dynamic)
    made = decomposed(program)
    assert not any(node.target._schema.is_mutable for node in edit.calls(made.graph) if hasattr(node.target, "_schema"))
    xs = [torch.randn(4, 6) for _ in range(3)]
    torch.testing.assert_close(run(made, xs), run(program, xs), rtol=0, atol=0)


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", WHOLE)
def test_what_torch_has_to_trace(case: str) -> None:
    """It is told apart, and canonicalized all the same."""
    program = program_of(WHOLE[case], False)
    with pytest.raises(NotSimple):
        decomposed(program)
    xs = [torch.randn(4, 6) for _ in range(3)]
    torch.testing.assert_close(run(canonicalize(program).source, xs), run(program, xs), rtol=0, atol=0)


def test_buffers_in_one_memory_are_no_buffers_of_their_own() -> None:
    """A write to one of them would have to be seen in the other."""

    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            both = torch.zeros(4, 6)
            self.register_buffer("all", both)
            self.register_buffer("first", both[0])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.all.add_(x)  # type: ignore[operator]
            return self.first * 1  # type: ignore[operator]

    with pytest.raises(ProgramError, match="cannot be made functional"):
        canonicalize(export(Views(), (torch.randn(4, 6),)))


def test_ops_of_others_are_believed_nothing() -> None:
    """`step` need not be what `step_` writes."""
    library = torch.library.Library("tests_of_decompose", "DEF")
    library.define("step(Tensor x) -> Tensor")
    library.define("step_(Tensor(a!) x) -> Tensor(a!)")
    library.impl("step", lambda x: x * 3, "CPU")
    library.impl("step_", lambda x: x.add_(3), "CPU")
    library.impl("step", lambda x: torch.empty_like(x), "Meta")
    library.impl("step_", lambda x: x, "Meta")

    class Steps(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 1
            torch.ops.tests_of_decompose.step_(y)
            return y * 2

    with pytest.raises(NotSimple):
        decomposed(export(Steps(), (torch.randn(3),)))


def test_a_buffer_that_is_written_and_put_back_is_still_written() -> None:
    program = program_of(SIMPLE["a_buffer_put_back_as_it_was"], False)
    assert tpcompiler.parallelize(program, 2, {}).verify((torch.randn(4, 6),), then=[(torch.randn(4, 6),)]).ok


@pytest.mark.parametrize("place", [lambda x: x.select(1, 0), lambda x: x[..., 1:3]])
def test_what_a_write_to_a_view_makes_lies_as_its_op_lays_it(place: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def write(_: Call, x: torch.Tensor) -> torch.Tensor:
        written = x.clone()
        place(written).mul_(2).add_(1)
        return written

    x = torch.randn(3, 4, 6)
    made = tpcompiler.parallelize(export(Call(write), (x,)), 2, {})
    assert findings(made) == []
    assert made.verify((x,)).ok
