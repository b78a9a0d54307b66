"""Which device a program is made for, and what is refused by name."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram, export

import tpcompiler
from tests.devices import other_devices
from tests.passes.stages import Call, canonical
from tpcompiler.errors import UnsupportedError
from tpcompiler.ir.devices import device_type_for
from tpcompiler.passes.canonicalize import canonicalize


class Placed(nn.Module):
    def __init__(self, weight: str, table: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4, device=weight), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(4, device=weight), requires_grad=False)
        self.register_buffer("table", torch.empty(4, device=table))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias) + self.table.to(x.device) + torch.arange(4).to(x.device)


def placed(weight: str, table: str) -> ExportedProgram:
    """Exported where there need be no such device: torch's fake tensors carry one without it."""
    with FakeTensorMode(), torch.no_grad():
        return export(Placed(weight, table), (torch.empty(2, 4, device=weight),))


def refusal(program: ExportedProgram, wanted: str | None) -> str:
    with pytest.raises(UnsupportedError) as raised:
        tpcompiler.parallelize(program, 2, {}, device_type=wanted)
    return str(raised.value)


def test_tensors_on_two_devices() -> None:
    program = placed("cuda:1", "cpu")
    assert refusal(program, None) == (
        "the program's tensors are on several devices: 'table', 'arange' are on cpu; 'weight', 'bias', 'x' and 5 more "
        "are on cuda:1\n"
        "  help: give device_type to move all to one, or export the model on one device"
    )
    for wanted in ("cpu", "cuda"):
        made = tpcompiler.parallelize(program, 2, {}, device_type=wanted)
        assert made.device_type == wanted
        assert other_devices(made.rank_program(1), wanted) == []
    assert other_devices(program, "cuda"), "the search sees what was there before"


@pytest.mark.parametrize("wanted", [None, "cpu", "cuda"])
def test_tensors_without_values(wanted: str | None) -> None:
    """Export bakes the meta device into factories, and a tensor on it has no values to move."""
    assert refusal(placed("meta", "cpu"), wanted) == (
        "'weight', 'bias', 'x' and 5 more are on the meta device, which is no place to run: its tensors have no values\n"
        "  help: export the model on the CPU; one that is too large for that, under FakeTensorMode"
    )


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (
            "cuda:1",
            "device_type is 'cuda:1', one device of a machine\n  help: give 'cuda': every rank takes a separate device",
        ),
        ("tpu", "device_type is 'tpu', not one of cpu and cuda\n  help: give 'cpu' or 'cuda'"),
    ],
)
def test_a_type_of_device_that_is_none(wanted: str, expected: str) -> None:
    assert refusal(export(nn.Linear(4, 4), (torch.ones(2, 4),)), wanted) == expected


def test_an_op_that_one_kind_of_device_has() -> None:
    class Attention(nn.Module):
        def forward(self, q: torch.Tensor) -> torch.Tensor:
            return torch.ops.aten._scaled_dot_product_efficient_attention(q, q, q, None, False)[0]

    with FakeTensorMode(), torch.no_grad():
        program = canonicalize(export(Attention(), (torch.empty(1, 2, 4, 8, device="cuda"),)))
    with pytest.raises(UnsupportedError) as raised:
        device_type_for(program, "cpu")
    assert str(raised.value).startswith(
        "'_scaled_dot_product_efficient_attention' (aten._scaled_dot_product_efficient_attention.default) has no kernel "
        "on cpu\n"
        "  help: convert the program as torch.export gives it, without run_decompositions()\n"
        "  used at: test_devices.py:"
    )
    assert device_type_for(program, None) == device_type_for(program, "cuda") == "cuda"


def test_a_backward_of_one_kind_of_device() -> None:
    """The export of a forward may move to another device; that of a backward has chosen its kernels."""
    attends = Call(lambda self, q: F.scaled_dot_product_attention(self.up(q), q, q).sum(), up=nn.Linear(8, 8))
    given = (torch.ones(1, 2, 4, 8),)
    assert device_type_for(canonicalize(export(attends, given)), "cuda") == "cuda"
    said = refusal(tpcompiler.export_training(attends, given), "cuda")
    assert "_for_cpu" in said
    assert "help: export the model on cuda" in said


def test_memory_that_is_read_as_it_lies() -> None:
    """How a result lies in memory is its kernel's choice; a dense one lies the same on every device."""
    strided = canonicalize(export(Call(lambda self, x: torch.relu(x.t()).as_strided((4,), (1,))), (torch.ones(2, 4),)))
    with pytest.raises(UnsupportedError) as raised:
        device_type_for(strided, "cuda")
    assert raised.value.message.endswith(
        "(as_strided) reads memory as a kernel of another device than cuda laid it out"
    )
    assert device_type_for(strided, "cpu") == "cpu"
    dense = canonicalize(export(Call(lambda self, x: torch.relu(x).as_strided((4,), (1,))), (torch.ones(2, 4),)))
    assert device_type_for(dense, "cuda") == "cuda"


def test_a_program_says_where_it_is() -> None:
    program = canonical(nn.Linear(4, 4), (torch.ones(2, 4),))
    assert device_type_for(program, None) == "cpu"
    assert device_type_for(program, "cuda") == "cuda"
