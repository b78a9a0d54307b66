"""Programs that the compiler takes in part only: right where they are taken, refused by name where not."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

import tpcompiler
from tests.bad_input.models import PLAN, Net, X, exported, refusal
from tests.compared import compare
from tests.opaque import opaque
from tpcompiler.checkpoint.leaves import placed_shardings
from tpcompiler.errors import ProgramError, ShardingError
from tpcompiler.parallel.program_subject import layout_of


@torch.library.custom_op("toy::add_one", mutates_args={"x"})
def add_one(x: torch.Tensor) -> None:
    x.add_(1)


@add_one.register_fake
def _(x: torch.Tensor) -> None:
    return None


@torch.library.custom_op("toy::single_only", mutates_args=())
def single_only(x: torch.Tensor) -> torch.Tensor:
    assert x.dtype == torch.float32
    return x * 2


@single_only.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def in_place(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.both(x)
    add_one(y)
    return y


def quantise(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.both(torch.quantize_per_tensor(x, 0.1, 0, torch.quint8).dequantize())


def sparse(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.both(x.to_sparse().to_dense())


DENSE = "export the model with plain dense tensors"


@pytest.mark.parametrize(
    ("function", "message", "help"),
    [
        (
            in_place,
            "the custom op toy.add_one.default changes its operands in place, which cannot be sharded yet",
            "write the op so that it returns what it makes",
        ),
        pytest.param(
            quantise,
            "'quantize_per_tensor' (aten.quantize_per_tensor.default) is a quantised tensor, which cannot be sharded "
            "yet",
            DENSE,
            marks=pytest.mark.skipif(torch.__version__ < (2, 12), reason="torch 2.11 exports no quantised tensor"),
        ),
        (
            sparse,
            "'to_sparse' (aten.to_sparse.default) is a sparse tensor (sparse_coo), which cannot be sharded yet",
            DENSE,
        ),
    ],
)
def test_what_is_refused(function: Callable[..., Any], message: str, help: str) -> None:
    said = refusal(exported(Net(function), X))
    first, second, *where = said.splitlines()
    assert (first, second) == (f"UnsupportedError: {message}", f"  help: {help}")
    assert re.fullmatch(r"  used at: (test_programs|models).py:\d+, in (\w+|<lambda>)", where[0])


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "function",
    [
        lambda self, x: F.dropout(self.both(x), 0.5, False),
        lambda self, x: F.dropout(self.both(x), 0.0, True),
        lambda self, x: (torch.rand(8), self.both(x))[1],
    ],
)
def test_what_draws_no_number_is_taken(function: Callable[..., Any]) -> None:
    assert tpcompiler.parallelize(exported(Net(function), X), 2, PLAN).verify((X,)).ok


def sparse_buffer() -> tuple[nn.Module, tuple[Any, ...]]:
    return Net(lambda self, x: self.both(self.near @ x), near=torch.eye(4).to_sparse_csr()), (X,)


def sparse_input() -> tuple[nn.Module, tuple[Any, ...]]:
    return Net(lambda self, x, near: self.both(torch.sparse.mm(near, x))), (X, torch.eye(4).to_sparse())


def subclass_input() -> tuple[nn.Module, tuple[Any, ...]]:
    return Net(), (TwoTensor(X, X),)


@pytest.mark.parametrize(
    ("build", "what"),
    [
        (sparse_buffer, "buffer 'near' is a sparse tensor (sparse_csr)"),
        (sparse_input, "input 'x_1' is a sparse tensor (sparse_coo)"),
        (subclass_input, "input 'x_0' is a tensor subclass (TwoTensor)"),
    ],
)
def test_tensors_that_are_not_dense(build: Callable[[], Any], what: str) -> None:
    module, inputs = build()
    said = refusal(exported(module, *inputs))
    assert said == f"UnsupportedError: {what}, which cannot be sharded yet\n  help: {DENSE}"


def weight_of_two_parts(net: Net) -> None:
    net.up.weight = nn.Parameter(TwoTensor(torch.randn(16, 8), torch.randn(16, 8)))


def weight_norm(net: Net) -> None:
    nn.utils.parametrizations.weight_norm(net.up)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("change", "shapes"), [(weight_of_two_parts, [[8, 8], [8, 8]]), (weight_norm, [[8, 1], [8, 8]])]
)
def test_what_parametrizations_make_of_a_weight_follows_its_layer(
    change: Callable[[Net], None], shapes: list[list[int]]
) -> None:
    """torch writes a subclass as its plain tensors, and weight_norm's direction and length, in the same way."""
    net = Net()
    change(net)
    made = tpcompiler.parallelize(exported(net, X), 2, PLAN)
    state = made.rank_program(0).state_dict
    assert [list(state[f"up.parametrizations.weight.original{i}"].shape) for i in (0, 1)] == shapes
    assert {c.kind for c in made.collectives()} == {"all_reduce"}
    assert made.verify((X,)).ok


def chosen_rows(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.both(x[torch.nonzero(x[:, 0] > 0)[:, 0]])


def scaled_by_an_item(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.both(x) + self.both(x).sum().item()


def first_rows(self: Any, x: torch.Tensor) -> torch.Tensor:
    count = (x[:, 0] > 0).sum().item()
    torch._check(count >= 1)
    torch._check(count <= 4)
    return self.both(x[:count])


@pytest.mark.slow
@pytest.mark.parametrize("function", [chosen_rows, scaled_by_an_item, first_rows])
def test_sizes_that_depend_on_data(function: Callable[..., Any], tmp_path: Path) -> None:
    """As many rows as the data says, on every rank, in memory and from files."""
    program = exported(Net(function), X)
    made = tpcompiler.parallelize(program, 2, PLAN)
    made.save(tmp_path / "out")
    for given in (X, X.abs(), torch.where(torch.arange(4)[:, None] == 0, X.abs(), -X.abs())):
        assert made.verify((given,)).ok
        assert tpcompiler.open(tmp_path / "out").verify((given,), original=program).ok


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16, dtype=torch.complex64), nn.Linear(16, 8, dtype=torch.complex64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))


@pytest.mark.slow
def test_complex_numbers() -> None:
    """Compared as rounded numbers, real and imaginary part."""
    x = torch.randn(4, 8, dtype=torch.complex64)
    made = tpcompiler.parallelize(exported(Complex(), x), 2, PLAN)
    report = made.verify((x,))
    assert report.ok
    assert 0 < report.outputs[0].tolerance < 1e-4
    for part in (1.0, 1j):  # negative control: one part of one bias is off
        rank = made.rank_program(1)
        rank.state_dict["up.bias"].data[0] += 0.1 * part
        programs = [made.rank_program(0), rank]
        assert not compare(made.only.original(), programs, (x,), {}, layout_of(made.only), ["x"], ["output"]).ok


@pytest.mark.slow
def test_an_op_that_knows_one_dtype() -> None:
    """The float64 run that sets the tolerance calls it as it was exported."""
    made = tpcompiler.parallelize(exported(Net(lambda self, x: single_only(self.both(x))), X), 2, PLAN)
    report = made.verify((X,))
    assert report.ok
    assert report.outputs[0].tolerance < 1e-4


class Int8(nn.Module):
    """A weight of whole numbers beside its scales."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(-127, 127, (rows, columns), dtype=torch.int8))
        self.register_buffer("scale", torch.rand(rows, 1) / 100 + 0.01)
        self.bias = nn.Parameter(torch.randn(rows))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.to(torch.float32) * self.scale, self.bias)


@pytest.mark.slow
def test_int8_weights_are_cut_with_their_scales() -> None:
    net = Net(up=Int8(16, 8), down=Int8(8, 16))
    made = tpcompiler.parallelize(exported(net, X), 2, PLAN)
    placed = {
        name: sharding.text(made.mesh) for name, sharding in placed_shardings(made.only.manifest).items() if "." in name
    }
    assert placed == {
        "up.weight": "S(0)",
        "up.scale": "S(0)",
        "up.bias": "S(0)",
        "down.weight": "S(1)",
        "down.scale": "R",
        "down.bias": "P(sum)",
    }
    assert [c.kind for c in made.collectives()] == ["all_reduce"]
    assert made.verify((X,)).ok


def test_a_scaled_norm_weight_is_no_linear() -> None:
    norm = nn.Module()
    norm.weight = nn.Parameter(torch.ones(8))
    said = refusal(
        exported(Net(lambda self, x: self.both(x) * (1 + self.norm.weight), norm=norm), X), {"norm": "colwise"}
    )
    assert said.startswith("PlanError: style 'colwise' does not fit 'norm': no weight of it has output features\n")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda state: state.pop("up.weight"),
            "ProgramError: the program has no value for parameter 'up.weight'\n"
            "  help: export the model again: its state was taken apart",
        ),
        (
            lambda state: state.update({"up.weight": nn.Parameter(torch.ones(16, 9))}),
            "ProgramError: parameter 'up.weight' is f32[16, 9], the graph was exported with f32[16, 8]\n"
            "  help: put in the weights of the model that was exported, or export again",
        ),
        (
            lambda state: state.update({"up.weight": nn.Parameter(torch.ones(16, 8, dtype=torch.float16))}),
            "ProgramError: parameter 'up.weight' is f16[16, 8], the graph was exported with f32[16, 8]\n"
            "  help: put in the weights of the model that was exported, or export again",
        ),
    ],
)
def test_weights_that_are_not_the_graphs(change: Callable[[dict[str, Any]], Any], expected: str) -> None:
    program = copy.deepcopy(exported(Net(), X))
    change(program.state_dict)
    assert refusal(program) == expected


def test_weights_without_values_convert_and_are_not_run(tmp_path: Path) -> None:
    with FakeTensorMode():
        program = torch.export.export(Net(), (torch.randn(4, 8),))
    made = tpcompiler.parallelize(program, 2, PLAN)
    assert made.rank_program(1).state_dict["up.weight"].shape == (8, 8)
    with pytest.raises(ProgramError) as raised:
        made.verify((X,))
    assert str(raised.value) == (
        "the program cannot be run: 4 of its weights have no values, such as 'down.bias'\n"
        "  help: export the model with its weights, or convert it and cut them from a checkpoint"
    )
    with pytest.raises(ProgramError) as raised:
        made.save(tmp_path / "out", layout="ranks")
    assert str(raised.value) == (
        "the program cannot be written in self-contained files: 4 of its weights have no values, such as 'down.bias'\n"
        "  help: export the model with its weights, or convert it and cut them from a checkpoint"
    )
    assert not list(tmp_path.iterdir())


def test_a_weight_that_meets_an_op_without_a_rule() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.both(x).sum() + opaque(self.down.weight)

    with pytest.raises(ShardingError) as raised:
        tpcompiler.parallelize(exported(Net(forward, hidden=8), torch.randn(8, 8)), 2, {"down.weight": "S(0)"})
    assert str(raised.value).splitlines()[:2] == [
        "cannot shard 'down.weight' on dim 0 of 8 by mesh axis 'tp' of 2 for tests.opaque.default: it has no rule",
        "  help: pin 'down.weight' to R (0 B sent per rank and call)",
    ]
