"""What the ranks are compared with: the program that the user exported, as torch runs it."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import export

import tpcompiler
from tests.runtime.models import export_divided
from tpcompiler._torch import set_guards
from tpcompiler.judge.compare.compare import compare_calls
from tpcompiler.judge.compare.simulate import random_state
from tpcompiler.judge.compare.trial import run_single
from tpcompiler.parallel.program_subject import subject_of

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


@pytest.mark.sample(1)
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


@pytest.mark.slow
@pytest.mark.parametrize("after", [wider_copy, normed])
def test_what_is_wrong_there_is_noticed(after: Callable[..., torch.Tensor]) -> None:
    """The negative control: ranks with another weight."""
    net, x = Net(after), torch.randn(4, 8)
    right = tpcompiler.parallelize(export(net, (x,)), 2, PLAN)
    other = copy.deepcopy(net)
    with torch.no_grad():
        other.down.weight.mul_(1.01)
    wrong = tpcompiler.parallelize(export(other, (x,)), 2, PLAN)
    right.converted.partition.rank_program = wrong.rank_program  # type: ignore[method-assign]
    assert not right.verify((x,)).ok


@pytest.mark.parametrize("inside", [False, True])
def test_inference_mode(inside: bool) -> None:
    made = tpcompiler.parallelize(export(Net(lambda y, held: y + held), (torch.randn(4, 8),)), 2, PLAN)
    with torch.inference_mode():
        x = torch.randn(4, 8)
        if inside:
            assert made.verify((x,)).ok
    assert made.verify((x,)).ok


def scratch(y: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    y.uniform_()
    held[2:].normal_()
    return F.dropout(y + held, 0.5, True, inplace=True)


def hidden(split: Callable[..., Any], *sizes: Any) -> Callable[..., torch.Tensor]:
    """A write beside a view whose schema does not say that it is one, and a write to such a view."""

    def after(y: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
        first, second = split(y, *sizes, 1)
        y.mul_(2)
        split(held[None], *sizes, 1)[1].add_(y[0, 4:])
        return torch.cat([second, first], 1) + held

    return after


def no_autocast(y: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        held.add_(1)
        return y @ held[:, None]


HIDDEN = {
    "unsafe_chunk": hidden(torch.unsafe_chunk, 2),
    "unsafe_split": hidden(torch.unsafe_split, 4),
    "unsafe_split_with_sizes": hidden(torch.unsafe_split_with_sizes, [4, 4]),
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("after", [wider_copy, wider_buffer, bits, normed, layout_only, no_autocast, *HIDDEN.values()])
def test_in_float64_it_is_the_same_model(after: Callable[..., torch.Tensor]) -> None:
    """What is memory of its own stays so, and what is not shares it, buffers too."""
    net, x = Net(after), torch.randn(4, 8)
    got = run_single(export(copy.deepcopy(net), (x,)), [x], torch.float64)
    assert got.outputs[0].dtype == torch.float64
    if after in (layout_only, *HIDDEN.values()):  # no dtype is part of the model
        exact = copy.deepcopy(net).double()
        assert torch.equal(got.outputs[0], exact(x.double()))
        assert torch.equal(got.mutated.get("held", exact.held), exact.held)
    torch.testing.assert_close(got.outputs[0].float(), net(x))
    torch.testing.assert_close(got.mutated.get("held", net.held).float(), net.held)


@pytest.mark.sample(5)
@pytest.mark.parametrize("after", [wider_buffer, bits, scratch, layout_only, *HIDDEN.values()])
def test_it_runs_as_torch_runs_it(after: Callable[..., torch.Tensor]) -> None:
    """Bit for bit, with all that is written and drawn, on copies of its state."""
    program, x = export(Net(after), (torch.randn(4, 8),)), torch.randn(4, 8)
    before = {name: value.clone() for name, value in program.state_dict.items()}
    state = random_state()
    got = run_single(program, [x])
    assert all(torch.equal(value, before[name]) for name, value in program.state_dict.items())
    assert torch.equal(random_state()[0], state[0])
    module = program.module()
    assert torch.equal(got.outputs[0], module(x))
    assert got.drawn is not None
    assert torch.equal(got.drawn[0], random_state()[0])
    assert torch.equal(got.mutated["held"], module.held)


@pytest.mark.sample(1)
@pytest.mark.parametrize("after", HIDDEN.values(), ids=HIDDEN)
def test_a_canonical_form_that_loses_a_write_is_not_equal(
    after: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ranks are made of is not what they are compared with."""
    program, x = export(Net(after), (torch.randn(4, 8),)), torch.randn(4, 8)
    assert tpcompiler.parallelize(program, 2, {}).verify((x,), then=[(x,)]).ok
    monkeypatch.setattr("tpcompiler.frontend.kernel_differences.VIEWS", {})
    assert not tpcompiler.parallelize(program, 2, {}).verify((x,)).ok


def test_numbers_that_nobody_uses_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that leaves a draw out is named for it, though all its outputs are right."""

    def after(y: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
        result = y + torch.rand(8)
        held.view(2, -1).diagonal().uniform_()  # torch traces the whole program again
        torch.rand(3)
        return result

    program, x = export(Net(after), (torch.randn(4, 8),)), torch.randn(4, 8)
    assert tpcompiler.parallelize(program, 2, {}).verify((x,)).ok
    monkeypatch.setattr("tpcompiler._torch.decompose._AndDraws", set)
    report = tpcompiler.parallelize(program, 2, {}).verify((x,))
    assert [d.name for d in report.outputs if not d.ok] == ["the random numbers drawn"]


class Experts(nn.Module):
    """A product in bfloat16 in the middle of a model in float32; it has no kernel for float64."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(4, *shape) / 4) for shape in ((32, 64), (64, 32)))
        self.head = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        h = torch._grouped_mm(x.bfloat16(), self.up.bfloat16(), offs=ends).float().relu()
        made = torch._grouped_mm(h.bfloat16(), self.down.bfloat16(), offs=ends)
        return self.head(made.float())  # type: ignore[no-any-return]


def test_a_narrow_op_inside_of_a_wide_model() -> None:
    """Its rounding is seen, and no more is allowed for it: in float32 the judge stays as strict as ever."""
    x, ends = torch.randn(32, 32), torch.tensor([8, 16, 20, 32], dtype=torch.int32)
    made = tpcompiler.parallelize(export(Experts(), (x, ends)), 2, {"up": "S(2)", "down": "S(1)"})
    report = made.verify((x, ends))
    assert report.ok, report
    narrow, wide = report.outputs
    assert 2**-9 < narrow.tolerance < 0.1
    assert wide.tolerance < 1e-5
    ranks = [copy.deepcopy(made.rank_program(rank)) for rank in range(2)]
    for rank in ranks:
        (reduced,) = (node for node in rank.graph.nodes if "all_reduce" in str(node.target))
        reduced.replace_all_uses_with(reduced.args[0])
        rank.graph.erase_node(reduced)
    made.converted.partition.rank_program = ranks.__getitem__  # type: ignore[method-assign]
    assert [d.ok for d in made.verify((x, ends)).outputs] == [False, False]


@torch.library.custom_op("tests::only_narrow", mutates_args=())
def only_narrow(x: torch.Tensor) -> torch.Tensor:
    if x.dtype == torch.float64:
        raise NotImplementedError
    return x * 3


@only_narrow.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_an_op_without_a_wider_kernel_is_moved_by_its_rounding() -> None:
    """Both runs would round alike, so that their difference would not show it."""
    x = torch.randn(4, 8)
    program = export(Net(lambda y, held: only_narrow(held)), (x,))
    want, exact = (run_single(program, [x], run).outputs[0].double() for run in (None, torch.float64))
    assert 2**-25 < ((exact - want) / want).abs().max() < 2**-23


def test_inputs_that_the_export_excludes_are_refused() -> None:
    """The program divides by zero there, and the module does not: there is nothing to compare."""
    parallel = tpcompiler.parallelize(export_divided(), 2, {})
    assert parallel.verify((torch.ones(3, 8), 3)).ok
    with pytest.raises(tpcompiler.InputsError, match="the export assumed that n != 1"):
        parallel.verify((torch.ones(3, 8), 1))


def test_ranks_that_refuse_their_shares_are_noticed() -> None:
    """The ranks run in one process without their assertions on inputs."""
    x = torch.ones(4, 8)
    subject = subject_of(tpcompiler.parallelize(export(nn.Linear(8, 8), (x,)), 2, {}, inputs=["S(0)"]).only)
    assert compare_calls({"": subject}, [("", (x,), {})]).ok
    set_guards(subject.programs[0], ["L['input'].size()[0] == 4"])
    report = compare_calls({"": subject}, [("", (x,), {})])
    assert not report.ok
    assert "the ranks refuse their shares of the inputs, as not input.size()[0] == 4" in str(report)
