"""Where a program's tensors go; the meta device stands in for one that this machine does not have."""

from __future__ import annotations

import torch
from torch import nn
from torch.export import export

from tests.passes.models import Tied
from tpcompiler.runtime.place import place_state


class Held(nn.Module):
    """A parameter, a frozen one, a buffer, one that is not saved, and a lifted literal."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.up.bias.requires_grad_(False)
        self.register_buffer("kept", torch.ones(4))
        self.register_buffer("table", torch.ones(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x) + self.kept + self.table + torch.tensor([1.0, 2.0, 3.0, 4.0])


def test_all_that_is_held_moves() -> None:
    program = export(Held(), (torch.ones(2, 4),))
    place_state(program, "meta")
    held = {**program.state_dict, **program.constants}
    assert sorted(held) == ["kept", "lifted_tensor_0", "table", "up.bias", "up.weight"]
    assert {value.device.type for value in held.values()} == {"meta"}
    assert {name: type(value) for name, value in held.items() if name.startswith("up")} == {
        "up.weight": nn.Parameter,
        "up.bias": nn.Parameter,
    }
    assert [held[f"up.{name}"].requires_grad for name in ("weight", "bias")] == [True, False]
    assert program.example_inputs is not None
    assert program.example_inputs[0][0].device.type == "meta"
    assert {value.device.type for value in program.module().state_dict().values()} == {"meta"}


def test_what_is_there_already_is_not_copied() -> None:
    program = export(Held(), (torch.ones(2, 4),))
    before = {**program.state_dict, **program.constants}
    place_state(program, "cpu")
    assert all(value is before[name] for name, value in {**program.state_dict, **program.constants}.items())


def test_tied_weights_stay_one_tensor() -> None:
    program = export(Tied(), (torch.tensor([1, 2]),))
    assert len(program.state_dict) == 2
    program.state_dict["head.weight"] = nn.Parameter(program.state_dict["embed.weight"].detach())  # as a file is read
    place_state(program, "meta")
    assert program.state_dict["head.weight"] is program.state_dict["embed.weight"]
