"""Put the tensors that a program holds on the device that it runs on."""

from __future__ import annotations

import torch
from torch.export import ExportedProgram

from tpcompiler._torch import tree_map
from tpcompiler.runtime.weightless import hollow_like


def place_state(program: ExportedProgram, device: torch.device | str) -> None:
    """Move parameters, buffers, constants and example inputs, in place; what is on the device already is not copied.

    A program that `parallelize` made for CUDA names its device in the graph and holds its tensors on the CPU, because
    it was made where there need be no GPU. `tpcompiler.load` calls this. A program that torch alone has loaded is moved
    by `torch.export.passes.move_to_device_pass`, but not by `program.module().to`, which leaves lifted literals behind.
    """
    made: dict[object, torch.Tensor] = {}
    for held in (program.state_dict, program.constants):
        for name, value in held.items():
            if isinstance(value, torch.Tensor):
                key = memory_of(value)
                if key not in made:
                    made[key] = _placed(value, device)
                held[name] = made[key]
    if program.example_inputs is not None:
        program.example_inputs = tree_map(
            lambda value: _placed(value, device) if isinstance(value, torch.Tensor) else value, program.example_inputs
        )


def memory_of(value: torch.Tensor) -> object:
    """Equal for tensors that are tied: one copy serves them, here as on the CPU."""
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or not value.numel():
        return id(value)
    storage = value.untyped_storage().data_ptr()
    return storage, value.storage_offset(), value.shape, value.stride(), value.dtype, type(value)


def _placed(value: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    moved = value.detach().to(device)
    if moved.device == value.device:
        return value
    if isinstance(value, torch.nn.Parameter):
        return torch.nn.Parameter(moved, requires_grad=value.requires_grad)
    return moved.requires_grad_(value.requires_grad)


def leave_out(program: ExportedProgram, fqn: str) -> None:
    """Put a tensor of the same shape in the place of a leaf that takes no room in a file."""
    held = program.state_dict if fqn in program.state_dict else program.constants
    value = held[fqn]
    if value.numel():
        held[fqn] = hollow_like(value)
