"""Collectives of a finished program become torch's `symm_mem` ops where these fit."""

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
from tpcompiler.ir.claims import CLAIM, read_claim
from tpcompiler.ir.local import is_contiguous
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

# What torch's one-shot kernel takes.
DTYPES, ALIGNED_BYTES, MOST_RANKS = (torch.float32, torch.bfloat16), 4, 8


@dataclass(frozen=True)
class Buffer:
    """Symmetric memory that the one-shot reductions of a group take, one after the other: a constant of the program."""

    name: str
    group: str
    dtype: torch.dtype
    numel: int


@dataclass
class Fit:
    """What to replace: every collective that it can be, if it is `wanted`.

    `sizes`: of each group. `buffers`: what the one-shot reductions need, found on the way.
    """

    sizes: Mapping[str, int]
    wanted: Callable[[fx.Node], bool]
    buffers: dict[str, Buffer] = field(default_factory=dict)

    def buffer_for(self, node: fx.Node) -> Buffer:
        """The buffer that an all_reduce takes, made large enough."""
        value, group = edit.operands(node)[0].meta["val"], str(node.args[-1])
        name = f"_symm_mem_{list(self.sizes).index(group)}_{DTYPES.index(value.dtype)}"  # the same on all ranks
        known = self.buffers.get(name, Buffer(name, group, value.dtype, 0))
        self.buffers[name] = replace(known, numel=max(known.numel, value.numel()))
        return self.buffers[name]


def fit_collectives(program: ExportedProgram, fit: Fit) -> ExportedProgram:
    """Replace the collectives that `fit` speaks of by ops over symmetric memory.

    Before    linear = linear(x, w)
              all_reduce = all_reduce(linear, 'sum', 'tp=2:tp')
              wait_tensor = wait_tensor(all_reduce)
    After     symm_mem_0: a constant, f32[64]
              part = view(slice(symm_mem_0, 0, 0, 64), [4, 16])
              wait_tensor = one_shot_all_reduce_copy(part, linear, 'sum', 'tp=2:tp')

    And linear with reduce_scatter, or all_gather with every linear after it, is one fused op. What runs is the same
    function; `expand_collectives` makes the first program of the second. The buffers that `fit` is given are constants
    without values, for they are no memory of a file: `tpcompiler.load` allocates them.
    """
    graph, signature = edit.copy_graph(program.graph), copy_signature(program.graph_signature)
    read_bodies(graph, program.graph_module)
    placed: dict[str, fx.Node] = {}
    held: dict[str, torch.Tensor] = {}

    def constant(buffer: Buffer) -> fx.Node:
        if buffer.name not in placed:
            held[buffer.name] = torch.zeros(buffer.numel, dtype=buffer.dtype)
            placed[buffer.name] = add_constant(graph, signature, buffer.name, held[buffer.name])
        return placed[buffer.name]

    _fit_graph(graph, fit, constant)
    return rebuilt(program, graph, signature, {**program.constants, **held})


def _fit_graph(graph: fx.Graph, fit: Fit, constant: Callable[[Buffer], fx.Node]) -> None:
    """Replace what fits, in place; `constant` gives the node of a buffer.

    Before    linear = linear(x, w)                                 after a norm of S(1): all_gather, linear
              all_reduce = all_reduce(linear, 'sum', 'tp=2:tp')
              wait_tensor = wait_tensor(all_reduce)
    After     part = view(slice(buffer, 0, 0, 64), [4, 16])
              wait_tensor = one_shot_all_reduce_copy(part, linear, 'sum', 'tp=2:tp')
    """
    regions: dict[str, list[fx.Node]] = {}
    for node in edit.calls(graph):
        if name := read_claim(node).get("reshard"):
            regions.setdefault(name, []).append(node)
    reduced = []
    for nodes in regions.values():
        kinds = [node.target for node in nodes]
        if not (called := [node for node in nodes if edit.is_collective(node)]) or not edit.operands(nodes[0]):
            continue  # a slice, or what begins with one
        (source, *_), value = edit.operands(nodes[0]), edit.outputs(nodes[-1])[0]
        is_static = all(isinstance(size, int) for size in (*source.meta["val"].shape, *value.shape))
        if not is_static or not all(map(fit.wanted, called)):
            continue
        if kinds == [ALL_REDUCE, WAIT] and _fits_one_shot(nodes[0], fit):
            reduced.append(nodes)
            fit.buffer_for(nodes[0])
        elif kinds in _forms(REDUCE_SCATTER, fit.sizes):
            _fit_scatter(source, nodes)
        elif kinds in _forms(ALL_GATHER, fit.sizes):
            _fit_gather(source, nodes)
    for first, wait in reduced:  # now that the buffers have their sizes
        value = wait.meta["val"]
        part = insert_call(wait, aten.slice.Tensor, (constant(fit.buffer_for(first)), 0, 0, value.numel()))
        room = insert_call(wait, aten.view.default, (part, list(value.shape)))
        _stand_for([first, wait], ONE_SHOT, (room, *first.args))


def _forms(kind: Any, sizes: Mapping[str, int]) -> list[list[Any]]:
    """The calls of an even change along the first dim, and along another one, as `lower_reshards` makes them."""
    if kind is ALL_GATHER:
        moved = [aten.permute.default, aten.clone.default, aten.view.default]
        return [[kind, WAIT], [aten.unsqueeze.default, kind, WAIT, *moved]]
    parts = [[aten.split.Tensor, *[operator.getitem] * n, aten.cat.default] for n in set(sizes.values())]
    return [[kind, WAIT], *([*part, kind, WAIT] for part in parts)]


def _fits_one_shot(node: fx.Node, fit: Fit) -> bool:
    value = edit.operands(node)[0].meta["val"]
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
    """linear, then reduce_scatter."""
    before, after = source.meta["val"], nodes[-1].meta["val"]
    (collective,) = (node for node in nodes if node.target is REDUCE_SCATTER)
    dim = _changed_dim(before, after)
    if collective.args[1] == "sum" and dim is not None and _fits_matmul(source, before) and len(source.users) == 1:
        x, weight = source.args
        turned = insert_call(nodes[-1], aten.permute.default, (weight, [1, 0]))
        _stand_for([source, *nodes], MATMUL_SCATTER, (x, turned, "sum", dim, collective.args[-1]))


def _fit_gather(source: fx.Node, nodes: list[fx.Node]) -> None:
    """all_gather, then every linear that takes what is gathered and whose weight is there by then."""
    last, group = nodes[-1], next(node.args[-1] for node in nodes if node.target is ALL_GATHER)
    dim = _changed_dim(last.meta["val"], source.meta["val"])
    if dim is None:
        return
    order = {node: at for at, node in enumerate(last.graph.nodes)}
    fits = [user for user in last.users if _fits_matmul(user, last.meta["val"]) and user.args[0] is last]
    fits = [user for user in fits if order[user.args[1]] < order[last]]
    if not fits:
        return
    kept = len(fits) < len(last.users)
    turned = [insert_call(last, aten.permute.default, (user.args[1], [1, 0])) for user in fits]
    value = (last.meta["val"] if kept else None, [user.meta["val"] for user in fits])
    made = insert_call(last, GATHER_MATMUL, (source, turned, dim, group), {"return_A": kept}, value)
    made.meta["custom"] = {CLAIM: {"stands_for": [_said(node) for node in (*nodes, *fits)]}}
    results = insert_call(last, operator.getitem, (made, 1), value=value[1])
    for at, user in enumerate(fits):
        _stand_for([user], operator.getitem, (results, at))
    if kept:
        _stand_for(nodes, operator.getitem, (made, 0))
    else:
        for node in reversed(nodes):
            edit.erase(node)


def _fits_matmul(node: fx.Node, rows: torch.Tensor) -> bool:
    """A linear without a bias, for which torch's fused ops have no room."""
    return node.target is aten.linear.default and len(node.args) == 2 and rows.ndim > 1


def _changed_dim(one: torch.Tensor, other: torch.Tensor) -> int | None:
    """The dim that a collective works on; not the last one, which a matmul sums over or makes."""
    found = [dim for dim, sizes in enumerate(zip(one.shape, other.shape, strict=True)) if len(set(sizes)) > 1]
    return found[0] if len(found) == 1 and found[0] < one.ndim - 1 else None


def _said(node: fx.Node) -> list[Any]:
    """What `_Written.call` (ir/symm_mem.py) reads: name, claim, and where in the model."""
    stack = (node.meta.get("nn_module_stack") or {}).items()
    named = [[key, path, kind if isinstance(kind, str) else kind.__qualname__] for key, (path, kind) in stack]
    return [node.name, dict(read_claim(node)), named, node.meta.get("stack_trace", "")]


def _stand_for(nodes: Sequence[fx.Node], target: Any, args: tuple[Any, ...]) -> None:
    """One call in the place of nodes of which others use the last; it has its name, and says what it stands for."""
    last = nodes[-1]
    made = insert_call(last, target, args, value=last.meta["val"])
    if target is not operator.getitem:
        made.meta["custom"] = {CLAIM: {"stands_for": [_said(node) for node in nodes]}}
    _take_place(made, last)
    for node in reversed(nodes[:-1]):
        edit.erase(node)


def _take_place(made: fx.Node, node: fx.Node) -> None:
    edit.replace_uses(node, made)
    name = node.name
    edit.erase(node)
    made.name = name
