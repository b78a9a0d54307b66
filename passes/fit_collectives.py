"""Replace collectives of a finished program by torch's `symm_mem` ops where these fit."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from tpcompiler._torch import aten
from tpcompiler.ir import edit
from tpcompiler.ir.bodies import read_bodies
from tpcompiler.ir.local import is_contiguous
from tpcompiler.ir.node_placement import CLAIM, claim_data, read_claim
from tpcompiler.ir.rebuilt import add_constant, copy_signature, rebuilt
from tpcompiler.ir.symm_mem import (
    ALL_GATHER,
    ALL_REDUCE,
    GATHER_MATMUL,
    MATMUL_SCATTER,
    ONE_SHOT,
    REDUCE_SCATTER,
    WAIT,
    insert_call,
)

# Limits of torch's one-shot kernel.
DTYPES, ALIGNED_BYTES, MOST_RANKS = (torch.float32, torch.bfloat16), 4, 8


@dataclass(frozen=True)
class Buffer:
    """Symmetric memory that a group's one-shot reductions use one after the other: a constant of the program."""

    name: str
    group: str
    dtype: torch.dtype
    numel: int


@dataclass
class Fit:
    """The collectives to replace: those that are `wanted` and can be replaced.

    `sizes`: by group. `buffers`: the buffers that one-shot reductions need, collected on the way.
    """

    sizes: Mapping[str, int]
    wanted: Callable[[fx.Node], bool]
    buffers: dict[str, Buffer] = field(default_factory=dict)

    def buffer_for(self, node: fx.Node) -> Buffer:
        """Return the buffer that an all_reduce uses, made large enough."""
        value, group = edit.fake(edit.operands(node)[0]), str(node.args[-1])
        name = f"_symm_mem_{list(self.sizes).index(group)}_{DTYPES.index(value.dtype)}"  # the same on all ranks
        buffer = self.buffers.get(name, Buffer(name, group, value.dtype, 0))
        self.buffers[name] = replace(buffer, numel=max(buffer.numel, value.numel()))
        return self.buffers[name]


def fit_collectives(program: ExportedProgram, fit: Fit) -> ExportedProgram:
    """Replace the collectives that `fit` selects by ops over symmetric memory.

    Before    linear = linear(x, w)
              all_reduce = all_reduce(linear, 'sum', 'tp=2:tp')
              wait_tensor = wait_tensor(all_reduce)
    After     symm_mem_0: a constant, f32[64]
              part = view(slice(symm_mem_0, 0, 0, 64), [4, 16])
              wait_tensor = one_shot_all_reduce_copy(part, linear, 'sum', 'tp=2:tp')

    A linear with a reduce_scatter, or an all_gather with every linear after it, becomes one fused op. The program
    computes the same function, and `expand_collectives` restores it. The buffers are constants without values, because
    no file holds them: `tpcompiler.load` allocates them.
    """
    graph, signature = edit.copy_graph(program.graph), copy_signature(program.graph_signature)
    read_bodies(graph, program.graph_module)
    placeholders: dict[str, fx.Node] = {}
    zeros: dict[str, torch.Tensor] = {}

    def constant(buffer: Buffer) -> fx.Node:
        if buffer.name not in placeholders:
            zeros[buffer.name] = torch.zeros(buffer.numel, dtype=buffer.dtype)
            placeholders[buffer.name] = add_constant(graph, signature, buffer.name, zeros[buffer.name])
        return placeholders[buffer.name]

    _fit_graph(graph, fit, constant)
    return rebuilt(program, graph, signature, {**program.constants, **zeros})


def _fit_graph(graph: fx.Graph, fit: Fit, constant: Callable[[Buffer], fx.Node]) -> None:
    """Replace collectives that fit, in place; `constant` returns the node of a buffer.

    Before    linear = linear(x, w)                                 after a norm of S(1): all_gather, linear
              all_reduce = all_reduce(linear, 'sum', 'tp=2:tp')
              wait_tensor = wait_tensor(all_reduce)
    After     part = view(slice(buffer, 0, 0, 64), [4, 16])
              wait_tensor = one_shot_all_reduce_copy(part, linear, 'sum', 'tp=2:tp')
    """
    regions: dict[str, list[fx.Node]] = {}
    for node in edit.calls(graph):
        if name := read_claim(node).reshard:
            regions.setdefault(name, []).append(node)
    one_shots = []
    for nodes in regions.values():
        kinds = [node.target for node in nodes]
        if not (collectives := [node for node in nodes if edit.is_collective(node)]) or not edit.operands(nodes[0]):
            continue  # a slice, or a change that begins with one
        (source, *_), value = edit.operands(nodes[0]), edit.outputs(nodes[-1])[0]
        is_static = all(isinstance(size, int) for size in (*edit.shape(source), *value.shape))
        if not is_static or not all(map(fit.wanted, collectives)):
            continue
        if kinds == [ALL_REDUCE, WAIT] and _fits_one_shot(nodes[0], fit):
            one_shots.append(nodes)
            fit.buffer_for(nodes[0])
        elif kinds in _forms(REDUCE_SCATTER, fit.sizes):
            _fit_scatter(source, nodes)
        elif kinds in _forms(ALL_GATHER, fit.sizes):
            _fit_gather(source, nodes)
    for first, wait in one_shots:  # now that the buffers have their sizes
        value = edit.fake(wait)
        part = insert_call(wait, aten.slice.Tensor, (constant(fit.buffer_for(first)), 0, 0, value.numel()))
        room = insert_call(wait, aten.view.default, (part, list(value.shape)))
        _stand_for([first, wait], ONE_SHOT, (room, *first.args))


def _forms(kind: Any, sizes: Mapping[str, int]) -> list[list[Any]]:
    """Return the calls of even changes along the first dim, and along another dim, as `lower_reshards` writes them."""
    if kind is ALL_GATHER:
        moved = [aten.permute.default, aten.clone.default, aten.view.default]
        return [[kind, WAIT], [aten.unsqueeze.default, kind, WAIT, *moved]]
    parts = [[aten.split.Tensor, *[operator.getitem] * n, aten.cat.default] for n in set(sizes.values())]
    return [[kind, WAIT], *([*part, kind, WAIT] for part in parts)]


def _fits_one_shot(node: fx.Node, fit: Fit) -> bool:
    value = edit.fake(edit.operands(node)[0])
    count = value.numel() * value.itemsize
    return (
        node.args[1] == "sum"
        and value.dtype in DTYPES
        and is_contiguous(value)
        and count > 0
        and count % ALIGNED_BYTES == 0
        and fit.sizes[str(node.args[-1])] <= MOST_RANKS
    )


def _fit_scatter(source: fx.Node, nodes: list[fx.Node]) -> None:
    """Fuse a linear with the reduce_scatter after it."""
    before, after = edit.fake(source), edit.fake(nodes[-1])
    (collective,) = (node for node in nodes if node.target is REDUCE_SCATTER)
    dim = _changed_dim(before, after)
    if collective.args[1] == "sum" and dim is not None and _fits_matmul(source, before) and len(source.users) == 1:
        x, weight = source.args
        turned = insert_call(nodes[-1], aten.permute.default, (weight, [1, 0]))
        _stand_for([source, *nodes], MATMUL_SCATTER, (x, turned, "sum", dim, collective.args[-1]))


def _fit_gather(source: fx.Node, nodes: list[fx.Node]) -> None:
    """Fuse an all_gather with every linear that takes its result and whose weight exists by then."""
    last, group = nodes[-1], next(node.args[-1] for node in nodes if node.target is ALL_GATHER)
    dim = _changed_dim(edit.fake(last), edit.fake(source))
    if dim is None:
        return
    order = {node: at for at, node in enumerate(last.graph.nodes)}
    fits = [user for user in last.users if _fits_matmul(user, edit.fake(last)) and user.args[0] is last]
    fits = [user for user in fits if order[user.args[1]] < order[last]]
    if not fits:
        return
    is_also_used = len(fits) < len(last.users)
    turned = [insert_call(last, aten.permute.default, (user.args[1], [1, 0])) for user in fits]
    value = (edit.fake(last) if is_also_used else None, [edit.fake(user) for user in fits])
    fused = insert_call(last, GATHER_MATMUL, (source, turned, dim, group), {"return_A": is_also_used}, value)
    fused.meta["custom"] = {CLAIM: {"stands_for": [_record(node) for node in (*nodes, *fits)]}}
    results = insert_call(last, operator.getitem, (fused, 1), value=value[1])
    for at, user in enumerate(fits):
        _stand_for([user], operator.getitem, (results, at))
    if is_also_used:
        _stand_for(nodes, operator.getitem, (fused, 0))
    else:
        for node in reversed(nodes):
            edit.erase(node)


def _fits_matmul(node: fx.Node, rows: torch.Tensor) -> bool:
    """Return True for a linear without a bias, which torch's fused ops do not support."""
    return node.target is aten.linear.default and len(node.args) == 2 and rows.ndim > 1


def _changed_dim(one: torch.Tensor, other: torch.Tensor) -> int | None:
    """Return the dim that a collective changes; None for the last one, which a matmul sums over or produces."""
    changed = [dim for dim, sizes in enumerate(zip(one.shape, other.shape, strict=True)) if len(set(sizes)) > 1]
    return changed[0] if len(changed) == 1 and changed[0] < one.ndim - 1 else None


def _record(node: fx.Node) -> list[Any]:
    """Return the record that `ir/symm_mem.py` reads back: name, claim, and position in the model."""
    stack = (node.meta.get("nn_module_stack") or {}).items()
    modules = [[key, path, kind if isinstance(kind, str) else kind.__qualname__] for key, (path, kind) in stack]
    return [node.name, claim_data(read_claim(node)), modules, node.meta.get("stack_trace", "")]


def _stand_for(nodes: Sequence[fx.Node], target: Any, args: tuple[Any, ...]) -> None:
    """Replace nodes, only the last of which is used elsewhere, by one call that records what it stands for."""
    last = nodes[-1]
    call = insert_call(last, target, args, value=edit.fake(last))
    if target is not operator.getitem:
        call.meta["custom"] = {CLAIM: {"stands_for": [_record(node) for node in nodes]}}
    _take_place(call, last)
    for node in reversed(nodes[:-1]):
        edit.erase(node)


def _take_place(replacement: fx.Node, node: fx.Node) -> None:
    edit.replace_uses(node, replacement)
    name = node.name
    edit.erase(node)
    replacement.name = name
