"""The finished program of a rank is said to be for another kind of device."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from tpcompiler._torch import FakeTensorMode, OpOverload, aten, tree_map
from tpcompiler.errors import UnsupportedError
from tpcompiler.ir import edit
from tpcompiler.ir.bodies import change_bodies, read_bodies
from tpcompiler.ir.local import fake_mode_of, key, no_new_guards
from tpcompiler.ir.rebuilt import rebuilt
from tpcompiler.ir.sizes import statically_equal

ON_CPU = aten._scaled_dot_product_flash_attention_for_cpu.default
ON_CUDA = aten._scaled_dot_product_efficient_attention.default
QUERIES, KEYS = 32, 16  # it pads sums to the one, and reads masks by the other


def move_device(program: ExportedProgram, device_type: str) -> ExportedProgram:
    """Name `device_type`, without an index, wherever the program names a device.

    Before    table = arange(8, device=cpu)          on cpu
              rows = view(table, [2, 4])
              flag = scalar_tensor(1.0)              no operand: torch's default device
    After     table = arange(8, device=cuda)         on cuda
              rows = reshape(table, [2, 4])          what is a view on one device may be a copy on another
              flag = scalar_tensor(1.0, device=cuda)

    Works on any flat functional program, and back again. Parameters, buffers and constants stay where they are, for
    there may be no such device here: `runtime/place.py` moves them where the program runs. It is the last pass, because
    the others evaluate ops on fake tensors, which a torch without CUDA cannot do for all ops on CUDA (attention with
    dynamic sizes, batch norm in training), and because what they trace names the device with an index.
    """
    device = torch.device(device_type)
    there = all(value.device == device for node in program.graph.nodes for value in edit.outputs(node))
    if there and not any(_other_kernel(node, device_type) for node in program.graph.nodes):
        return program
    graph = edit.copy_graph(program.graph)
    read_bodies(graph, program.graph_module)
    mode = fake_mode_of(graph)
    made: dict[Any, torch.Tensor] = {}
    others = {node: other for node in graph.nodes if (other := _other_kernel(node, device_type)) is not None}

    def move_value(node: fx.Node) -> None:
        if node in others:
            node.target, node.args, node.kwargs = others[node]
            for part in [part for part in node.users if not part.users]:  # which a file has of each result
                edit.erase(part)
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda given: given.meta["val"])
            with mode, torch.no_grad():
                node.meta["val"] = node.target(*args, **kwargs)
        elif "val" in node.meta:
            known = {} if node.op == "placeholder" else made  # one value of two inputs would make them aliases
            node.meta["val"] = tree_map(functools.partial(_moved, device_type, mode, known), node.meta["val"])

    with no_new_guards(graph):
        # After all literals: whether a node has tensor operands is read off their values.
        for change in (functools.partial(_move_literals, device_type), move_value):
            change_bodies(graph, change)
            for node in graph.nodes:
                change(node)
    return rebuilt(program, graph)


def _other_kernel(node: fx.Node, device_type: str) -> tuple[OpOverload, tuple[Any, ...], dict[str, Any]] | None:
    """The call of the kernel that attends on this device and also gives each query's log-sum-exp, for that of another.

    Raises:
        UnsupportedError: the kernel needs other sizes.
    """
    if node.target is ON_CPU and device_type == "cuda":
        args = edit.bound(node)
        q, k = (args[name].meta["val"] for name in ("query", "key"))
        if not (statically_equal(q.shape[2] % QUERIES, 0) and statically_equal(k.shape[2] % KEYS, 0)):
            raise UnsupportedError(
                f"'{node.name}' attends from {q.shape[2]} steps of a rank to {k.shape[2]} in a turn, and its kernel on "
                f"cuda needs a multiple of {QUERIES} and one of {KEYS}",
                help="pad the sequence, or leave 'attend_in_turns' out of the plan",
                used_at=edit.source_line(node),
            )
        given = (args["query"], args["key"], args["value"], args["attn_mask"], True, 0.0, args["is_causal"])
        return ON_CUDA, given, {"scale": args["scale"]}
    if node.target is ON_CUDA and device_type == "cpu":
        args, (_, sums, *_) = edit.bound(node), node.meta["val"]
        used = {user.args[1] for user in node.users if user.users}
        if used <= {0, 1} and statically_equal(sums.shape[-1], args["query"].meta["val"].shape[2]):
            given = (args["query"], args["key"], args["value"], 0.0, args["is_causal"])
            return ON_CPU, given, {"attn_mask": args["attn_bias"], "scale": args["scale"]}
    return None


def _move_literals(device_type: str, node: fx.Node) -> None:
    if isinstance(node.target, OpOverload):
        _name_device(node, torch.device(device_type))
        if any(value.device.type != device_type for value in edit.outputs(node)):
            _allow_copy(node)


def _name_device(node: fx.Node, device: torch.device) -> None:
    """Replace a device that the call names; name it where the call has nothing else to tell it by."""
    assert isinstance(node.target, OpOverload)
    for argument in node.target._schema.arguments:
        if str(argument.type) in ("Device", "Optional[Device]"):
            if edit.bound(node)[argument.name] is not None or not edit.operands(node):
                edit.set_argument(node, argument.name, device)


def _allow_copy(node: fx.Node) -> None:
    """Kernels choose how their results lie in memory, so a view that one device can give may not be one on another."""
    if node.target in (aten.view.default, aten._unsafe_view.default):
        arguments = edit.bound(node)
        node.target, node.args, node.kwargs = aten.reshape.default, (arguments["self"], arguments["size"]), {}


def _moved(device_type: str, mode: FakeTensorMode, made: dict[Any, torch.Tensor], value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    layout = key(value), value.requires_grad
    if layout not in made:
        with mode:
            made[layout] = torch.empty_strided(
                value.shape,
                value.stride(),
                dtype=value.dtype,
                device=device_type,
                requires_grad=value.requires_grad,
            )
    return made[layout]
