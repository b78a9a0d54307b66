"""Replace all_reduces of a finished program by torch's one-shot reductions over symmetric memory where these fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from tpcompiler._torch import aten
from tpcompiler.ir import edit
from tpcompiler.ir.control_flow import read_bodies
from tpcompiler.ir.exported import add_constant, copy_signature, rebuilt
from tpcompiler.ir.local import insert_call, is_contiguous
from tpcompiler.ir.node_placement import CLAIM, claim_data, read_claim
from tpcompiler.ir.symm_mem import ALL_REDUCE, ONE_SHOT, WAIT

# Limits of torch's one-shot kernel.
DTYPES, ALIGNED_BYTES, MOST_RANKS = (torch.float32, torch.bfloat16), 4, 8


def fit_collectives(
    program: ExportedProgram, sizes: Mapping[str, int], is_wanted: Callable[[fx.Node], bool]
) -> ExportedProgram:
    """Replace the all_reduces that are wanted, and that fit, by reductions over symmetric memory.

    Before    linear = linear(x, w)
              all_reduce = all_reduce(linear, 'sum', 'tp=2:tp')
              wait_tensor = wait_tensor(all_reduce)
    After     symm_mem_0: a constant, f32[64]
              part = view(slice(symm_mem_0, 0, 0, 64), [4, 16])
              wait_tensor = one_shot_all_reduce_copy(part, linear, 'sum', 'tp=2:tp')

    The program computes the same function, and `expand_collectives` restores it. The buffers are constants without
    values, because no file holds them: `tpcompiler.load` allocates them. The reductions of one group and dtype use one
    buffer, one after the other.

    Args:
        sizes: the number of ranks of each group, by name.
    """
    graph, signature = edit.copy_graph(program.graph), copy_signature(program.graph_signature)
    read_bodies(graph, program.graph_module)
    changes: dict[str, list[fx.Node]] = {}
    for node in edit.calls(graph):
        if name := read_claim(node).reshard:
            changes.setdefault(name, []).append(node)
    one_shots: dict[str, list[list[fx.Node]]] = {}  # by buffer
    for nodes in changes.values():
        if [node.target for node in nodes] == [ALL_REDUCE, WAIT] and _fits(nodes[0], sizes) and is_wanted(nodes[0]):
            group, dtype = list(sizes).index(str(nodes[0].args[-1])), DTYPES.index(edit.fake(nodes[0]).dtype)
            one_shots.setdefault(f"_symm_mem_{group}_{dtype}", []).append(nodes)  # the same name on all ranks
    constants = dict(program.constants)
    for name, pairs in one_shots.items():
        values = [edit.fake(wait) for _, wait in pairs]
        constants[name] = torch.zeros(max(value.numel() for value in values), dtype=values[0].dtype)
        buffer = add_constant(graph, signature, name, constants[name])
        for (first, wait), value in zip(pairs, values, strict=True):
            part = insert_call(wait, aten.slice.Tensor, (buffer, 0, 0, value.numel()), "symm_mem")
            room = insert_call(wait, aten.view.default, (part, list(value.shape)), "symm_mem")
            _reduce_over(room, first, wait)
    return rebuilt(program, graph, signature, constants)


def _fits(node: fx.Node, sizes: Mapping[str, int]) -> bool:
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
        and sizes[str(node.args[-1])] <= MOST_RANKS
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
