"""Grouped queries: attention reads the heads of keys and values as they are stored, not repeated for their queries."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx

from tpcompiler._torch import aten, sym_hint
from tpcompiler.cost.kernels import find_kernels
from tpcompiler.ir import edit
from tpcompiler.ir.draws import remove_unused
from tpcompiler.ir.local import key, memory_order, no_new_guards
from tpcompiler.ir.program import IN_TURNS, Note, PlannedProgram
from tpcompiler.ir.region import Region
from tpcompiler.ir.sizes import statically_equal
from tpcompiler.passes._distinct_heads import HEADS, RESHAPES, DistinctHeads, find_distinct_heads, region_on
from tpcompiler.passes._kernels import bytes_in_memory, read_again
from tpcompiler.rules.attention import KERNELS
from tpcompiler.terminal.printed import format_bytes

STEPS = -2  # the dim after that of the heads
ATTENTION = aten.scaled_dot_product_attention.default
PRODUCTS = (aten.matmul.default, aten.bmm.default)
READERS = (ATTENTION, *PRODUCTS)
WHOLE = (ATTENTION, aten.flatten.using_ints, aten.unflatten.int, aten.reshape.default, aten.matmul.default)


def group_queries(program: PlannedProgram, device_type: str = "cpu") -> PlannedProgram:
    """Let attention read each head of keys and values once, where a program repeats it for a group of query heads.

    Before    keys = reshape(expand(unsqueeze(k, 2), [b, 2, 4, t, d]), [b, 8, t, d]); values likewise
              y = scaled_dot_product_attention(q, keys, values, mask)      q: [b, 8, s, d], k: [b, 2, t, d]
    After     rows = flatten(transpose(unflatten(q, 1, [2, 4]), 2, 3), 2, 3)      [b, 2, s * 4, d]
              y = scaled_dot_product_attention(rows, k, v, each row of the mask 4 times), in the order of q again

    The queries that share a head become more rows of that head; or, where the device's kernels take groups, the call
    gets `enable_gqa`. A product with a repeated operand, as in attention that is written out, is written likewise. A
    repetition is any chain of ops on heads that are equal in groups (`_distinct_heads.py`), if only attention uses it.
    Of the ways, the one that moves the fewest bytes is taken, which may be the repetition.
    """
    graph = edit.copy_graph(program.graph)
    leaves = replace(program, graph=graph).leaves()
    constants = {node: program.state(name) for node, name in leaves if name in program.source.constants}
    bodies, saved, kept = dict[Any, tuple[fx.Graph | None, int]](), list[int](), list[int]()
    with no_new_guards(graph):
        for node in edit.calls(graph):
            found = _find_grouped(node, constants)
            if found is not None:
                if (alike := found.alike) not in bodies:
                    bodies[alike] = found.choose(device_type)
                body, less = bodies[alike]
                if body is not None:
                    found.region(found.bodies[0]).put(body)
                    saved.append(less)
            elif node.target in KERNELS and program.gradients():
                kept += _repeated_bytes(node, constants)
        remove_unused(graph)
    notes = list[Note]()
    if saved:
        how = "once, not once for each head of queries"
        text = f"{_calls(saved)} each head of keys and values {how}: {format_bytes(sum(saved))} less to move"
        notes.append(Note("attention", text))
    if kept:
        why = "because gradients go through the repetition"
        text = f"{_calls(kept)} keys and values whose heads are repeated, {format_bytes(sum(kept))} in all, {why}"
        notes.append(Note("attention", text))
    return replace(program, graph=graph if saved else program.graph, notes=(*program.notes, *notes))


def _calls(counted: Sequence[int]) -> str:
    return f"{len(counted)} calls of attention read" if len(counted) > 1 else "the call of attention reads"


def _repeated_bytes(kernel: fx.Node, constants: Mapping[fx.Node, Tensor]) -> list[int]:
    """Return the bytes of keys and values that a kernel for training reads repeated, if it does."""
    q, *repeated = edit.operands(kernel)[:3]
    found = find_distinct_heads(repeated, edit.shape(q)[HEADS], constants)
    return [sum(sym_hint(value.numel()) * value.element_size() for value in map(edit.fake, repeated))] if found else []


@dataclass(frozen=True)
class _Grouped:
    """An attention, or a product of one that is written out, and ways to compute it without repeated heads.

    Attributes:
        parts: keys and values with distinct heads.
        others: queries, and a mask.
        bodies: torch code on all of these.
    """

    node: fx.Node
    parts: Sequence[DistinctHeads]
    others: Sequence[fx.Node]
    bodies: Sequence[Callable[..., Any]]

    def region(self, body: Callable[..., Tensor]) -> Region:
        return region_on(self.node, self.parts, self.others, body, WHOLE)

    @property
    def calls(self) -> list[fx.Node]:
        """The calls that repeat heads, and the one that reads them, in order."""
        return [*dict.fromkeys(node for part in self.parts for node in part.calls), self.node]

    @property
    def alike(self) -> Any:
        """A description that is equal for calls that may have one body."""
        inputs, calls = self.region(self.bodies[0]).inputs, self.calls
        place = {node: at for at, node in enumerate((*inputs, *calls))}
        wired = [edit.map_operands(node, lambda _, operand: ("operand", place.get(operand))) for node in calls]
        kinds = [(node.target, *call, node) for node, call in zip(calls, wired, strict=True)]
        return key((kinds, inputs, [place[part.value] for part in self.parts]))

    def choose(self, device_type: str) -> tuple[fx.Graph | None, int]:
        """Return the body that moves the fewest bytes, if they are fewer than now, and how many fewer."""
        now, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for value in self.region(self.bodies[0]).inputs:
            copies[value] = now.placeholder(value.name)
            copies[value].meta = {"val": edit.fake(value)}
        for node in self.calls:
            copies[node] = now.node_copy(node, lambda old: copies.get(old, old))
        now.output(copies[self.node])
        ways = [way for body in self.bodies if (way := self.region(body).trace()) is not None]
        moved = [_bytes_moved(way, device_type) for way in ways]
        least = min(moved, default=math.inf)
        less = _bytes_moved(now, device_type) - least
        return (ways[moved.index(least)], round(less)) if less > 0 else (None, 0)


def _find_grouped(node: fx.Node, constants: Mapping[fx.Node, Tensor]) -> _Grouped | None:
    """Return the ways to read a call's repeated operands, in the largest groups."""
    if node.target in PRODUCTS:
        q, *repeated = edit.operands(node)
        bodies: list[Callable[..., Any]] = [_multiply_rows]
        others, is_grouped = [q], False
    elif node.target is ATTENTION and IN_TURNS not in node.meta and not edit.arguments(node).dropout_p:
        args = edit.bound(node)
        q, *repeated = (args[name] for name in ("query", "key", "value"))
        call = _Attention(args["is_causal"], args["scale"], memory_order(edit.fake(node)))
        others = [q] if args["attn_mask"] is None else [q, args["attn_mask"]]
        bodies = [call.attend_in_groups, *([] if call.is_causal else [call.attend_in_rows])]
        is_grouped = args["enable_gqa"]
    else:
        return None
    parts: Sequence[DistinctHeads] | None
    if is_grouped:
        count, *_ = heads = [edit.shape(each)[HEADS] for each in (*repeated, q)]
        is_even = all(isinstance(each, int) and each % count == 0 for each in heads) and heads[0] == heads[1]
        parts = [DistinctHeads.of(value) for value in repeated] if is_even and heads[2] > count else None
    else:
        has_heads = edit.ndim(q) > 2 and all(edit.ndim(each) == edit.ndim(q) for each in repeated)
        parts = find_distinct_heads(repeated, edit.shape(q)[HEADS], constants) if has_heads else None
    if parts is None or not all(part.is_used_by(node, READERS) for part in parts):
        return None
    return _Grouped(node, parts, others, bodies)


@dataclass(frozen=True)
class _Attention:
    """A call on the distinct heads of keys and values; `order`: of the result's dims in memory."""

    is_causal: bool
    scale: float | None
    order: list[int]

    def attend_in_groups(self, k: Tensor, v: Tensor, q: Tensor, mask: Tensor | None = None) -> Any:
        return ATTENTION(q, k, v, mask, is_causal=self.is_causal, scale=self.scale, enable_gqa=True)

    def attend_in_rows(self, k: Tensor, v: Tensor, q: Tensor, mask: Tensor | None = None) -> Any:
        """Attend with rows [steps * group]: a cut of the steps stays a cut into runs of rows."""
        count = k.shape[HEADS]
        by_head = aten.unflatten.int(q, HEADS, [count, -1])  # [..., heads, group, steps, features]
        times = by_head.shape[HEADS]
        rows = aten.flatten.using_ints(by_head.transpose(HEADS, STEPS), HEADS, STEPS)
        seen = None if mask is None else _rows_of_mask(mask, count, times, q.shape[STEPS])
        if seen is NotImplemented:
            return NotImplemented
        made = aten.unflatten.int(ATTENTION(rows, k, v, seen, scale=self.scale), STEPS, [-1, times])
        if self.order.index(len(self.order) + STEPS) < self.order.index(len(self.order) + HEADS):
            by_step = made.movedim(HEADS, HEADS - 1)  # [..., steps, heads, group, features]
            return aten.flatten.using_ints(by_step, HEADS, STEPS).transpose(HEADS, STEPS)
        return aten.flatten.using_ints(made.transpose(HEADS, STEPS), HEADS - 1, HEADS)


def _rows_of_mask(mask: Tensor, count: int, times: int, steps: Any) -> Any:
    """Return the mask of rows [steps * group], from one of [..., heads or 1, steps or 1, keys]."""
    has_heads = mask.ndim > 2 and not statically_equal(mask.shape[HEADS], 1)
    is_alike = statically_equal(mask.shape[STEPS], 1)  # for all steps
    if is_alike and not has_heads:
        return mask
    if is_alike and not isinstance(steps, int):
        return NotImplemented
    by_head = (
        aten.unflatten.int(mask, HEADS, [count, times]).transpose(HEADS, STEPS) if has_heads else mask.unsqueeze(-2)
    )
    sizes = [-1] * by_head.ndim
    sizes[-3:] = [steps if is_alike else -1, times, -1]
    return aten.flatten.using_ints(by_head.expand(sizes), -3, -2)


def _multiply_rows(few: Tensor, q: Tensor) -> Any:
    """Multiply rows [group * steps], which are a view of both the operand and the result if these are dense."""
    rows = aten.flatten.using_ints(aten.unflatten.int(q, HEADS, [few.shape[HEADS], -1]), HEADS, STEPS)
    times = q.shape[HEADS] // few.shape[HEADS]
    return aten.flatten.using_ints(aten.unflatten.int(rows @ few, STEPS, [times, -1]), HEADS - 1, HEADS)


def _bytes_moved(graph: fx.Graph, device_type: str) -> float:
    """Return the bytes that pass through memory if every op is a kernel, also in reshapes that copy."""
    total = 0.0
    for node, kernel in find_kernels(graph, fuses=False).items():
        values = [*(edit.fake(operand) for operand in edit.operands(node)), *edit.outputs(node)]
        moves = zip(kernel.moves, values, strict=bool(kernel.moves))
        total += sum(share * bytes_in_memory(value) for share, value in moves)
        total += read_again(node, device_type) if node.target is ATTENTION else 0
    for node in edit.calls(graph):
        operands = [edit.fake(operand) for operand in edit.operands(node)]
        changed = [(operands[0], edit.fake(node).shape)] if node.target in RESHAPES else []
        if node.target is aten.matmul.default:  # it merges batch dims
            changed = [
                (each, (math.prod(each.shape[:STEPS]), *each.shape[STEPS:])) for each in operands if each.ndim > 3
            ]
        total += sum(
            2 * sym_hint(value.numel()) * value.element_size() for value, shape in changed if not _is_view(value, shape)
        )
    return total


def _is_view(value: Tensor, shape: Sequence[Any]) -> bool:
    """Return True if a change of shape needs no copy."""
    try:
        value.view(shape)
    except (RuntimeError, ValueError):
        return False
    return True
