"""Collectives as torch's `symm_mem` ops, over memory that the GPUs of a group map from each other.

Such an op runs on CUDA only. It stands for ordinary collectives, which are restored wherever a program is checked,
compared or shown (`passes/fit_collectives.py` is the opposite direction).
"""

from __future__ import annotations

import contextlib
import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.export import ExportedProgram

from tpcompiler._torch import aten, c10d_functional, enable_python_dispatcher, symm_mem
from tpcompiler.errors import ArtifactError, UnsupportedError, option
from tpcompiler.ir import edit
from tpcompiler.ir.bodies import read_bodies
from tpcompiler.ir.local import fake_mode_of
from tpcompiler.ir.node_placement import CLAIM, read_claim
from tpcompiler.ir.rebuilt import copy_signature, rebuilt
from tpcompiler.ir.text import op_name

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, WAIT = (
    getattr(c10d_functional, name).default
    for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "wait_tensor")
)
ONE_SHOT = symm_mem.one_shot_all_reduce_copy.default
MATMUL_SCATTER = symm_mem.fused_matmul_reduce_scatter.default
GATHER_MATMUL = symm_mem.fused_all_gather_matmul.default


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
            f"'{node.name}' ({node.target}) stands for no collectives that can be told", help="convert again"
        ) from error


def fitted_text(graph: fx.Graph) -> str:
    """Return `2 one_shot_all_reduce_copy over symmetric memory; 1 all_gather_into_tensor left to NCCL`."""
    kinds = Counter(op_name(node) for node in edit.calls(graph) if is_fitted(node))
    ordinary = Counter(op_name(node) for node in edit.calls(graph) if edit.is_collective(node))
    texts = [", ".join(f"{count} {name}" for name, count in each.items()) for each in (kinds, ordinary)]
    return f"{texts[0] or 'none'} over symmetric memory; {texts[1] or 'nothing'} left to NCCL"


def is_fitted(node: fx.Node) -> bool:
    """Return True if a node calls one of these ops."""
    return str(node.target).startswith("symm_mem.")


def expand_collectives(program: ExportedProgram) -> ExportedProgram:
    """Return the program with ordinary collectives, for any device; unchanged if it has no others.

    Raises:
        ArtifactError: as `expand_graph`.
    """
    if not any(map(is_fitted, program.graph.nodes)):
        return program
    graph, signature = edit.copy_graph(program.graph), copy_signature(program.graph_signature)
    read_bodies(graph, program.graph_module)
    rooms = expand_graph(graph)
    names = {node.name for node in rooms}
    dropped = {spec.target for spec in signature.input_specs if spec.arg.name in names}
    signature.input_specs = [spec for spec in signature.input_specs if spec.target not in dropped]
    for node in rooms:
        edit.erase(node)
    constants = {name: value for name, value in program.constants.items() if name not in dropped}
    return rebuilt(program, graph, signature, constants)


def insert_call(before: fx.Node, target: Any, args: tuple[Any, ...], kwargs: Any = None, value: Any = None) -> fx.Node:
    node = edit.insert_before(before, target, args, "symm_mem")
    node.kwargs = kwargs or {}
    edit.record(node, value)
    if value is None:
        with fake_mode_of(before.graph), torch.no_grad(), enable_python_dispatcher():
            values, keyword_values = fx.node.map_arg((node.args, node.kwargs), lambda used: edit.fake(used))
            edit.record(node, target(*values, **keyword_values))
    return node


def expand_graph(graph: fx.Graph) -> list[fx.Node]:
    """Replace the ops by the collectives that they stand for, in place. Return the placeholders of buffers, now unused.

    Raises:
        ArtifactError: an unknown op, an op with invalid arguments, or an op that does not record what it stands for.
    """
    rooms: dict[fx.Node, None] = {}
    for node in edit.calls(graph):
        if is_fitted(node):
            with _explaining(node):
                if node.target is ONE_SHOT:
                    rooms[_buffer(node)] = None
                EXPANSIONS[node.target](_Replacement(node))
    return [node for node in rooms if not node.users]


class _Replacement:
    """The calls that replace one node, with the names and claims that the node stores for them."""

    def __init__(self, node: fx.Node) -> None:
        self.node, self.said = node, iter(read_claim(node).stands_for or ())
        self.args: Any = node.args
        self.made: dict[fx.Node, str] = {}

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        name, claim, stack, trace = next(self.said)
        inserted = insert_call(self.node, target, args, kwargs)
        modules = {key: (path, kind) for key, path, kind in stack}
        inserted.meta |= {"custom": {CLAIM: claim}, "nn_module_stack": modules, "stack_trace": trace}
        self.made[inserted] = name
        return inserted

    def replace(self, uses: dict[fx.Node, fx.Node], unused: Sequence[fx.Node]) -> None:
        for node, replacement in uses.items():
            edit.replace_uses(node, replacement)
            edit.erase(node)
        for node in unused:
            if not node.users:
                edit.erase(node)
        for replacement, name in self.made.items():
            replacement.name = name


def _expand_one_shot(calls: _Replacement) -> None:
    room, value, op, group = calls.args
    part = room.args[0]
    wait = calls.call(WAIT, calls.call(ALL_REDUCE, value, op, group))
    calls.replace({calls.node: wait}, [room, part])


def _expand_scatter(calls: _Replacement) -> None:
    x, turned, op, dim, group = calls.args
    value = calls.call(aten.linear.default, x, _straight(turned))
    size = edit.shape(value)[dim]
    degree = size // edit.shape(calls.node)[dim]
    if dim:
        split = calls.call(aten.split.Tensor, value, size // degree, dim)
        value = calls.call(aten.cat.default, [calls.call(operator.getitem, split, at) for at in range(degree)])
    wait = calls.call(WAIT, calls.call(REDUCE_SCATTER, value, op, degree, group))
    calls.replace({calls.node: wait}, [turned])


def _expand_gather(calls: _Replacement) -> None:
    x, weights, dim, group = calls.args
    before, (after, *_) = edit.shape(x), edit.fake(calls.node)[1]
    degree = after.shape[dim] // before[dim]
    value = x if dim == 0 else calls.call(aten.unsqueeze.default, x, 0)
    value = calls.call(WAIT, calls.call(ALL_GATHER, value, degree, group))
    if dim:
        value = calls.call(aten.permute.default, value, [*range(1, dim + 1), 0, *range(dim + 1, len(before) + 1)])
        value = calls.call(aten.clone.default, value, memory_format=torch.contiguous_format)
        shape = [size * degree if at == dim else size for at, size in enumerate(before)]
        value = calls.call(aten.view.default, value, shape)
    products = [calls.call(aten.linear.default, value, _straight(weight)) for weight in weights]
    uses: dict[fx.Node, fx.Node] = {}
    unused: list[fx.Node] = [calls.node, *weights]
    user: Any
    for user in calls.node.users:
        if user.args[1] == 0:
            uses[user] = value
        else:
            uses |= {each: products[each.args[1]] for each in user.users}
            unused.insert(0, user)
    calls.replace(uses, unused)


def _straight(turned: Any) -> fx.Node:
    """Return the weight of a linear from its transpose."""
    if turned.target is not aten.permute.default or turned.args[1] != [1, 0]:
        raise TypeError("no weight of a linear")
    return turned.args[0]  # type: ignore[no-any-return]


EXPANSIONS = {ONE_SHOT: _expand_one_shot, MATMUL_SCATTER: _expand_scatter, GATHER_MATMUL: _expand_gather}
