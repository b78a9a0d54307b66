"""Replace all_reduces of a finished program by torch's one-shot reductions over symmetric memory where these fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from tpcompiler._torch import aten
from tpcompiler.ir import edit
from tpcompiler.ir.control_flow import read_bodies
from tpcompiler.ir.exported import add_constant, copy_signature, rebuilt
from tpcompiler.ir.local import is_contiguous
from tpcompiler.ir.node_placement import CLAIM, claim_data, read_claim
from tpcompiler.ir.symm_mem import ALL_REDUCE, ONE_SHOT, WAIT, insert_call

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
    """The all_reduces to replace: those that are `wanted` and can be replaced.

    `sizes`: by group. `buffers`: the buffers that they need, collected on the way.
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
    """Replace the all_reduces that `fit` selects by reductions over symmetric memory.

    Before    linear = linear(x, w)
              all_reduce = all_reduce(linear, 'sum', 'tp=2:tp')
              wait_tensor = wait_tensor(all_reduce)
    After     symm_mem_0: a constant, f32[64]
              part = view(slice(symm_mem_0, 0, 0, 64), [4, 16])
              wait_tensor = one_shot_all_reduce_copy(part, linear, 'sum', 'tp=2:tp')

    The program computes the same function, and `expand_collectives` restores it. The buffers are constants without
    values, because no file holds them: `tpcompiler.load` allocates them.
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
    """Replace all_reduces that fit, in place; `constant` returns the node of a buffer.

    Before    linear = linear(x, w)
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
        if [node.target for node in nodes] == [ALL_REDUCE, WAIT] and _fits(nodes[0], fit) and fit.wanted(nodes[0]):
            one_shots.append(nodes)
            fit.buffer_for(nodes[0])
    for first, wait in one_shots:  # now that the buffers have their sizes
        value = edit.fake(wait)
        part = insert_call(wait, aten.slice.Tensor, (constant(fit.buffer_for(first)), 0, 0, value.numel()))
        room = insert_call(wait, aten.view.default, (part, list(value.shape)))
        _reduce_over(room, first, wait)


def _fits(node: fx.Node, fit: Fit) -> bool:
    value = edit.fake(edit.operands(node)[0])
    if not all(isinstance(size, int) for size in value.shape):
        return False
    count = value.numel() * value.itemsize
    return (
        node.args[1] == "sum"
        and value.dtype in DTYPES
        and is_contiguous(value)
        and count > 0
        and count % ALIGNED_BYTES == 0
        and fit.sizes[str(node.args[-1])] <= MOST_RANKS
    )


def _record(node: fx.Node) -> list[Any]:
    """Return the record that `ir/symm_mem.py` reads back: name, claim, and position in the model."""
    stack = (node.meta.get("nn_module_stack") or {}).items()
    modules = [[key, path, kind if isinstance(kind, str) else kind.__qualname__] for key, (path, kind) in stack]
    return [node.name, claim_data(read_claim(node)), modules, node.meta.get("stack_trace", "")]


def _reduce_over(room: fx.Node, first: fx.Node, wait: fx.Node) -> None:
    """Replace an all_reduce and its wait by one call that records them."""
    call = edit.insert_before(wait, ONE_SHOT, (room, *first.args), "symm_mem")
    edit.record(call, edit.fake(wait))
    call.meta["custom"] = {CLAIM: {"stands_for": [_record(node) for node in (first, wait)]}}
    edit.replace_uses(wait, call)
    name = wait.name
    edit.erase(wait)
    edit.erase(first)
    call.name = name
