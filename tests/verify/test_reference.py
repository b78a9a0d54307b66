"""What the ranks are compared with: the program as it was exported, or torch's functional form where that is not safe."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim, export

import tpcompiler
from tests.launch import fork_code
from tpcompiler.verify.reference import runnable

PLAN = {"up": "colwise", "down": "rowwise"}


class Net(nn.Module):
    """`after` gets what two layers make, and a buffer."""

    def __init__(self, after: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("held", torch.randn(8))
        self.after = after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.down(self.up(x)), self.held)


def wider_copy(y: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    wide = y.double()
    wide.mul_(3)
    return y + wide.float()


def wider_buffer(y: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    wide = held.double()
    wide.zero_()
    return y * held.add_(1)


def narrower_copy(y: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    narrow = y.half()
    narrow.mul_(3)
    return y + narrow


def bits(y: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    held.view(torch.int32).zero_()
    return y + held


def normed(y: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    wide = y.float()
    wide.mul_(torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5))
    return y + wide.to(y.dtype)


def layout_only(y: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    return y + held.unsqueeze_(0).squeeze_(0)


HERE = (wider_copy, wider_buffer, narrower_copy, normed, layout_only)


@pytest.mark.parametrize(
    ("after", "dtype"),
    [(bits, torch.float32), *itertools.product(HERE, (torch.float32, torch.bfloat16))],
)
def test_writes_in_place(after: Callable[..., torch.Tensor], dtype: torch.dtype) -> None:
    """A copy in one dtype is the thing itself in another, and the judge runs the program in several."""
    net, x = Net(after).to(dtype), torch.randn(4, 8, dtype=dtype)
    made = tpcompiler.parallelize(export(net, (x,)), 2, PLAN)
    report = made.verify((x,), then=[(torch.randn_like(x),)])
    assert report.ok, report
    narrow = dtype is torch.bfloat16 or after is narrower_copy
    assert all(d.tolerance < 1e-5 for d in report.outputs if "float32" in d.name or not narrow)


@pytest.mark.parametrize("after", [wider_copy, normed])
def test_what_is_wrong_there_is_noticed(after: Callable[..., torch.Tensor]) -> None:
    """The negative control: ranks with another weight."""
    net, x = Net(after), torch.randn(4, 8)
    right = tpcompiler.parallelize(export(net, (x,)), 2, PLAN)
    other = copy.deepcopy(net)
    with torch.no_grad():
        other.down.weight.mul_(1.01)
    wrong = tpcompiler.parallelize(export(other, (x,)), 2, PLAN)
    right.rank_program = wrong.rank_program  # type: ignore[method-assign]
    assert not right.verify((x,)).ok


@pytest.mark.parametrize("inside", [False, True])
def test_inference_mode(inside: bool) -> None:
    made = tpcompiler.parallelize(export(Net(lambda y, held: y + held), (torch.randn(4, 8),)), 2, PLAN)
    with torch.inference_mode():
        x = torch.randn(4, 8)
        if inside:
            assert made.verify((x,)).ok
    assert made.verify((x,)).ok


@pytest.mark.parametrize(
    ("after", "itself"),
    [
        (lambda y, held: torch.relu(y).flatten(0, 1), True),
        (lambda y, held: nn.functional.batch_norm(y, held, held.exp(), training=False), True),
        (lambda y, held: nn.functional.batch_norm(y, held, held.exp(), training=True), False),
        (lambda y, held: y.relu_(), False),
        (lambda y, held: torch.dropout(y, 0.5, True), False),
    ],
)
def test_which_programs_run_as_they_are(after: Any, itself: bool) -> None:
    program = export(Net(after), (torch.randn(4, 8),))
    assert (runnable(program) is program) == itself


def test_a_size_that_the_export_found_to_be_one_number() -> None:
    """Dim.AUTO leaves it a symbol by name; torch's module refuses others too."""
    net, x = Net(lambda y, held: y.div_(float(y.shape[0]))), torch.randn(6, 8)
    program = export(net, (x,), dynamic_shapes=({0: Dim.AUTO},))
    made = tpcompiler.parallelize(program, 2, PLAN)
    assert made.verify((x,)).ok
    with pytest.raises(tpcompiler.InputsError, match=r"the program takes torch.float32 \[6, 8\]"):
        made.verify((torch.randn(10, 8),))


class Divided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x)) * (100 // k.sum().item())  # type: ignore[no-any-return]


def test_a_number_that_data_decide() -> None:
    x, k = torch.randn(4, 8), torch.tensor([2, 3])
    made = tpcompiler.parallelize(export(Divided(), (x, k)), 2, PLAN)
    assert made.verify((x, k)).ok
    with pytest.raises(
        tpcompiler.InputsError, match="does not run on these inputs: integer division or modulo by zero"
    ):
        made.verify((x, torch.zeros_like(k)))


@pytest.mark.slow
def test_torch_says_nothing_beside_the_error() -> None:
    """Its log has tracebacks of what cannot be retraced."""
    script = """
import torch, tpcompiler
program = torch.export.export(torch.nn.Linear(8, 8), (torch.randn(4, 8),))
(x,) = [node for node in program.graph.nodes if node.name == "input"]
x.meta["val"] = x.meta["val"].new_empty(4, 7)
try:
    tpcompiler.parallelize(program, 2, {})
except tpcompiler.ProgramError as error:
    print(error.message)
"""
    done = fork_code(script)
    said = "the program cannot be made functional: a and b must have same reduction dim, but got [4, 7] X [8, 8]."
    assert (done.stdout, done.stderr) == (f"{said}\n", "")
