"""Reductions by torch's one-shot `symm_mem` op, over memory that the GPUs of a group map from each other.

The op runs on CUDA only. It stands for an all_reduce and its wait, which are restored wherever a program is checked,
compared or shown (`passes/fit_collectives.py` is the opposite direction).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.export import ExportedProgram

from tpcompiler._torch import c10d_functional, symm_mem
from tpcompiler.errors import ArtifactError, UnsupportedError, option
from tpcompiler.ir import edit
from tpcompiler.ir.control_flow import copy_with_bodies
from tpcompiler.ir.exported import copy_signature, rebuilt
from tpcompiler.ir.local import insert_call
from tpcompiler.ir.node_placement import CLAIM, read_claim
from tpcompiler.ir.text import op_name

ALL_REDUCE, WAIT = c10d_functional.all_reduce.default, c10d_functional.wait_tensor.default
ONE_SHOT = symm_mem.one_shot_all_reduce_copy.default


def refuse_symm_mem(device_type: str) -> None:
    """Raise an UnsupportedError for programs that are not for CUDA."""
    if device_type != "cuda":
        raise UnsupportedError(
            f"symmetric memory is of GPUs, and these programs are for {device_type!r}",
            help=option("convert with --device cuda", 'convert for device_type="cuda"')
            + ", or leave the collectives to NCCL or gloo",
        )


class Room(NamedTuple):
    """A constant in symmetric memory: the group whose GPUs map it, and the shape and dtype that a program uses."""

    group: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def rooms_of(program: ExportedProgram) -> dict[str, Room]:
    """Return the constants in symmetric memory, by name.

    Raises:
        ArtifactError: reductions of two groups use one constant; or as `expand_graph`.
    """
    rooms: dict[str, Room] = {}
    names = {spec.arg.name: str(spec.target) for spec in program.graph_signature.input_specs}
    for node in edit.calls(program.graph):
        if node.target is ONE_SHOT:
            with _explaining(node):
                buffer = _buffer(node)
                name, value, group = names[buffer.name], edit.fake(buffer), str(node.args[-1])
                room = rooms.setdefault(name, Room(group, tuple(value.shape), value.dtype))
                if room.group != group:
                    raise ValueError(f"memory of {room.group} and {group}")
    return rooms


def _buffer(one_shot: fx.Node) -> fx.Node:
    """Return the placeholder whose first elements a reduction uses."""
    room: Any = one_shot.args[0]
    part, value = room.args[0], edit.outputs(one_shot)[0]
    buffer: fx.Node = part.args[0]
    whole = edit.outputs(buffer)[0]
    is_first = part.args[1:] == (0, 0, value.numel()) and room.args[1:] == (list(value.shape),)
    if not is_first or buffer.op != "placeholder" or whole.dtype != value.dtype or whole.numel() < value.numel():
        raise ValueError("not the buffer's first elements")
    return buffer


@contextlib.contextmanager
def _explaining(node: fx.Node) -> Iterator[None]:
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, StopIteration) as error:
        raise ArtifactError(
            f"'{node.name}' ({node.target}) stands for no reduction that can be told", help="convert again"
        ) from error


def fitted_text(graph: fx.Graph) -> str:
    """Return `2 one_shot_all_reduce_copy over symmetric memory; 1 all_gather_into_tensor left to NCCL`."""
    kinds = Counter(op_name(node) for node in edit.calls(graph) if is_fitted(node))
    ordinary = Counter(op_name(node) for node in edit.calls(graph) if edit.is_collective(node))
    texts = [", ".join(f"{count} {name}" for name, count in each.items()) for each in (kinds, ordinary)]
    return f"{texts[0] or 'none'} over symmetric memory; {texts[1] or 'nothing'} left to NCCL"


def is_fitted(node: fx.Node) -> bool:
    """Return True if a node calls an op over symmetric memory."""
    return str(node.target).startswith("symm_mem.")


def expand_collectives(program: ExportedProgram) -> ExportedProgram:
    """Return the program with ordinary collectives, for any device; unchanged if it has no others.

    Raises:
        ArtifactError: as `expand_graph`.
    """
    if not any(map(is_fitted, program.graph.nodes)):
        return program
    graph, signature = copy_with_bodies(program.graph_module), copy_signature(program.graph_signature)
    rooms = expand_graph(graph)
    names = {node.name for node in rooms}
    dropped = {spec.target for spec in signature.input_specs if spec.arg.name in names}
    signature.input_specs = [spec for spec in signature.input_specs if spec.target not in dropped]
    for node in rooms:
        edit.erase(node)
    constants = {name: value for name, value in program.constants.items() if name not in dropped}
    return rebuilt(program, graph, signature, constants)


def expand_graph(graph: fx.Graph) -> list[fx.Node]:
    """Replace the ops by the reductions that they stand for, in place. Return the placeholders of buffers, now unused.

    Raises:
        ArtifactError: an unknown op, an op with invalid arguments, or an op without a record of what it replaces.
    """
    rooms: dict[fx.Node, None] = {}
    for node in edit.calls(graph):
        if is_fitted(node):
            with _explaining(node):
                if node.target is not ONE_SHOT:
                    raise TypeError("another op")
                rooms[_buffer(node)] = None
                _expand(node)
    return [node for node in rooms if not node.users]


def _expand(node: fx.Node) -> None:
    """Replace a one-shot reduction by an all_reduce and its wait, with the names and claims that it stores for them."""
    args: Any = node.args
    room, call, op, group = args
    names: dict[fx.Node, str] = {}
    targets = (ALL_REDUCE, (op, group)), (WAIT, ())
    for (target, rest), record in zip(targets, read_claim(node).stands_for or (), strict=True):
        name, claim, stack, trace = record
        call = insert_call(node, target, (call, *rest), "symm_mem")
        modules = {key: (path, kind) for key, path, kind in stack}
        call.meta |= {"custom": {CLAIM: claim}, "nn_module_stack": modules, "stack_trace": trace}
        names[call] = name
    edit.replace_uses(node, call)
    edit.erase(node)
    for unused in (room, room.args[0]):
        if not unused.users:
            edit.erase(unused)
    for made, name in names.items():
        made.name = name
