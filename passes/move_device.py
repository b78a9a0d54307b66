"""Retarget a rank's finished program to another device type."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from tpcompiler._torch import FakeTensorMode, OpOverload, tree_map
from tpcompiler.ir import edit
from tpcompiler.ir.control_flow import change_bodies, read_bodies
from tpcompiler.ir.exported import rebuilt
from tpcompiler.ir.local import fake_mode_of, fake_result, key, no_new_guards
from tpcompiler.ir.node_placement import read_claim
from tpcompiler.ir.sizes import are_equal
from tpcompiler.rules.attention import CPU_KERNEL, CUDA_KERNEL

Call = tuple[OpOverload, tuple[Any, ...], dict[str, Any]]


def move_device(program: ExportedProgram, device_type: str) -> ExportedProgram:
    """Name `device_type`, without an index, wherever the program names a device.

    Before    table = arange(8, device=cpu)          on cpu
              rows = view(table, [2, 4])
              flag = scalar_tensor(1.0)              no operand: torch's default device
    After     table = arange(8, device=cuda)         on cuda
              rows = reshape(table, [2, 4])          what is a view on one device may be a copy on another
              flag = scalar_tensor(1.0, device=cuda)

    Attention in turns gets the kernel of the device, even if the program is already there.

    Works on any flat functional program, in both directions. Parameters, buffers and constants stay where they are,
    because this machine may lack the device: `runtime/place.py` moves them where the program runs. It is the last pass:
    earlier ones evaluate ops on fake tensors, which torch without CUDA cannot do for all ops on CUDA (attention with
    dynamic sizes, batch norm in training), and their traces name the device with an index.
    """
    device = torch.device(device_type)
    there = all(value.device == device for node in program.graph.nodes for value in edit.outputs(node))
    if there and not any(_kernel_for(node, device_type) for node in program.graph.nodes):
        return program
    graph = edit.copy_graph(program.graph)
    read_bodies(graph, program.graph_module)
    mode = fake_mode_of(graph)
    cache: dict[Any, torch.Tensor] = {}
    kernels = {node: call for node in graph.nodes if (call := _kernel_for(node, device_type)) is not None}

    def move_value(node: fx.Node) -> None:
        if node in kernels:
            _change_kernel(node, kernels[node], mode)
        elif "val" in node.meta:
            own_cache = {} if node.op == "placeholder" else cache  # two inputs that share one value would be aliases
            edit.record(node, tree_map(functools.partial(_move, device_type, mode, own_cache), edit.fake(node)))

    with no_new_guards(graph):
        # After all literals, because a node's tensor operands are recognised by their values.
        for change in (functools.partial(_move_literals, device_type), move_value):
            change_bodies(graph, change)
            for node in graph.nodes:
                change(node)
    return rebuilt(program, graph)


def _kernel_for(node: fx.Node, device_type: str) -> Call | None:
    """Return the equivalent call on a device type, for a call of another device's kernel; None for any other call."""
    if node.target is CPU_KERNEL and device_type == "cuda":
        return _on_cuda(node)
    return _on_cpu(node) if node.target is CUDA_KERNEL and device_type == "cpu" else None


def _on_cuda(node: fx.Node) -> Call:
    args = edit.arguments(node)
    positional = args.query, args.key, args.value, args.attn_mask, True, args.dropout_p, args.is_causal
    return CUDA_KERNEL, positional, {"scale": args.scale}


def _on_cpu(node: fx.Node) -> Call | None:
    """Return the call on the CPU; None if the program already had the CUDA kernel, whose claim has its own results."""
    if len(read_claim(node).sharding or ()) != len(CPU_KERNEL._schema.returns):
        return None
    args = edit.arguments(node)
    positional = (args.query, args.key, args.value, args.dropout_p, args.is_causal)
    return CPU_KERNEL, positional, {"attn_mask": args.attn_bias, "scale": args.scale}


def _change_kernel(node: fx.Node, call: Call, mode: FakeTensorMode) -> None:
    _, sums = edit.outputs(node)[:2]
    node.target, node.args, node.kwargs = call
    results = list(fake_result(node))
    with mode:
        # torch does not prove that a dynamic size needs no padding
        if not are_equal(results[1].shape, sums.shape):
            results[1] = results[1].new_empty(sums.shape)
    edit.record(node, tuple(results))
    for part in list(node.users):
        at: Any = part.args[1]
        if part.users:
            edit.record(part, results[at])
        else:
            edit.erase(part)  # a program from a file has a getitem for every result


def _move_literals(device_type: str, node: fx.Node) -> None:
    if isinstance(node.target, OpOverload):
        _name_device(node, torch.device(device_type))
        if any(value.device.type != device_type for value in edit.outputs(node)):
            edit.allow_copy(node)  # other kernels may lay out their results differently


def _name_device(node: fx.Node, device: torch.device) -> None:
    """Replace a device that the call names, and name it if the call has no operand that implies it."""
    assert isinstance(node.target, OpOverload)
    for argument in node.target._schema.arguments:
        if str(argument.type) in ("Device", "Optional[Device]"):
            if edit.bound(node)[argument.name] is not None or not edit.operands(node):
                edit.set_argument(node, argument.name, device)


def _move(device_type: str, mode: FakeTensorMode, cache: dict[Any, torch.Tensor], value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    layout = key(value), value.requires_grad
    if layout not in cache:
        with mode:
            cache[layout] = torch.empty_strided(
                value.shape,
                value.stride(),
                dtype=value.dtype,
                device=device_type,
                requires_grad=value.requires_grad,
            )
    return cache[layout]
