"""Move a program's tensors to the device that it runs on."""

from __future__ import annotations

import torch
from torch.export import ExportedProgram

from tpcompiler._torch import map_symmetric, tree_map
from tpcompiler.errors import LaunchError, explaining, option
from tpcompiler.runtime.artifact import Manifest
from tpcompiler.runtime.weightless import hollow_like


def place_state(program: ExportedProgram, device: torch.device | str) -> None:
    """Move parameters, buffers, constants and example inputs in place; tensors already on the device are not copied.

    A program that `parallelize` made for CUDA names its device in the graph and has its tensors on the CPU, because no
    GPU is needed to make it. `tpcompiler.load` calls this function. For a program that torch alone has loaded, use
    `torch.export.passes.move_to_device_pass`, not `program.module().to`, which leaves lifted literals behind.
    """
    copies: dict[object, torch.Tensor] = {}
    for state in (program.state_dict, program.constants):
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                key = memory_of(value)
                if key not in copies:
                    copies[key] = _placed(value, device)
                state[name] = copies[key]
    if program.example_inputs is not None:
        program.example_inputs = tree_map(
            lambda value: _placed(value, device) if isinstance(value, torch.Tensor) else value, program.example_inputs
        )


def memory_of(value: torch.Tensor) -> object:
    """Return a key that tied tensors share: one copy serves them, on this device as on the CPU."""
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
    """Replace a leaf by a tensor of the same shape that takes no room in a file."""
    state = program.state_dict if fqn in program.state_dict else program.constants
    value = state[fqn]
    if value.numel():
        state[fqn] = hollow_like(value)


def map_buffers(program: ExportedProgram, manifest: Manifest, device: torch.device) -> None:
    """Replace the constants that the manifest lists as symmetric memory, in place.

    All ranks of a group must do so at the same time.

    Raises:
        LaunchError: GPUs cannot map each other's memory.
    """
    for name, group in manifest.symm_mem.items():
        value = program.constants[name]
        problem = f"the GPUs of the group {group!r} cannot map each other's memory"
        help = "run its ranks on one machine whose GPUs are linked (NVLink), or convert with "
        help += option("--collectives nccl", 'collectives="nccl"')
        with explaining(problem, help, RuntimeError, raised=LaunchError):
            program.constants[name] = map_symmetric(value.shape, value.dtype, device, group)
