"""Grouped queries: attention reads the heads of keys and values as they are stored, not repeated for their queries."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx

from tpcompiler._torch import aten, sym_hint
from tpcompiler.cost.fusion import moves_alone
from tpcompiler.ir import edit
from tpcompiler.ir.draws import remove_unused
from tpcompiler.ir.local import key, memory_order, no_new_guards
from tpcompiler.ir.program import IN_TURNS, Note, PlannedProgram
from tpcompiler.ir.region import Region
from tpcompiler.ir.sizes import statically_equal
from tpcompiler.passes._distinct_heads import HEADS, RESHAPES, DistinctHeads, find_distinct_heads, region_on
from tpcompiler.rules.attention import KERNELS
from tpcompiler.terminal.printed import format_bytes

STEPS = -2  # the dim after that of the heads
ATTENTION = aten.scaled_dot_product_attention.default
READERS = (ATTENTION, aten.matmul.default, aten.bmm.default)
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
                    found.ways[0].put(body)
                    saved.append(less)
            elif node.target in KERNELS and program.gradients():
                kept += _repeated_bytes(node, constants)
        remove_unused(graph)
    once = "each head of keys and values once, not once for each head of queries: {} less to move"
    repeated = "keys and values whose heads are repeated, {} in all, because gradients go through the repetition"
    notes = [_note(text, sizes) for text, sizes in ((once, saved), (repeated, kept)) if sizes]
    return replace(program, graph=graph if saved else program.graph, notes=(*program.notes, *notes))


def _note(text: str, sizes: Sequence[int]) -> Note:
    calls = f"{len(sizes)} calls of attention read" if len(sizes) > 1 else "the call of attention reads"
    return Note("attention", f"{calls} {text.format(format_bytes(sum(sizes)))}")


def _repeated_bytes(kernel: fx.Node, constants: Mapping[fx.Node, Tensor]) -> list[int]:
    """Return the bytes of keys and values that a kernel for training reads repeated, if it does."""
    q, *repeated = edit.operands(kernel)[:3]
    found = find_distinct_heads(repeated, edit.shape(q)[HEADS], constants)
    return [sum(sym_hint(value.numel()) * value.element_size() for value in map(edit.fake, repeated))] if found else []


@dataclass(frozen=True)
class _Grouped:
    """An attention, or a product of one that is written out; `ways`: to compute it from parts with distinct heads."""

    node: fx.Node
    parts: Sequence[DistinctHeads]
    ways: Sequence[Region]

    @property
    def calls(self) -> list[fx.Node]:
        """The calls that repeat heads, and the one that reads them, in order."""
        return [*dict.fromkeys(node for part in self.parts for node in part.calls), self.node]

    @property
    def alike(self) -> Any:
        """A description that is equal for calls that may have one body."""
        inputs, calls = self.ways[0].inputs, self.calls
        place = {node: at for at, node in enumerate((*inputs, *calls))}
        wired = [edit.map_operands(node, lambda _, operand: ("operand", place.get(operand))) for node in calls]
        kinds = [(node.target, *call, node) for node, call in zip(calls, wired, strict=True)]
        return key((kinds, inputs, [place[part.value] for part in self.parts]))

    def choose(self, device_type: str) -> tuple[fx.Graph | None, int]:
        """Return the body that moves the fewest bytes, if they are fewer than now, and how many fewer."""
        bodies = [body for way in self.ways if (body := way.trace()) is not None]
        moved = [_bytes_moved(edit.calls(body), device_type) for body in bodies]
        least = min(moved, default=math.inf)
        less = _bytes_moved(self.calls, device_type) - least
        return (bodies[moved.index(least)], round(less)) if less > 0 else (None, 0)


def _find_grouped(node: fx.Node, constants: Mapping[fx.Node, Tensor]) -> _Grouped | None:
    """Return the ways to read a call's repeated operands, in the largest groups."""
    if node.target not in READERS or IN_TURNS in node.meta or edit.bound(node).get("dropout_p"):
        return None
    args, (q, *repeated) = edit.bound(node), edit.operands(node)[:3]
    bodies, mask = list[Callable[..., Any]]((_multiply_rows,)), args.get("attn_mask")
    if node.target is ATTENTION:
        call = _Attention(args["is_causal"], args["scale"], memory_order(edit.fake(node)))
        bodies = [call.attend_in_groups, *([] if call.is_causal else [call.attend_in_rows])]
    if edit.ndim(q) < 3 or any(edit.ndim(each) != edit.ndim(q) for each in repeated):
        return None
    heads = [edit.shape(each)[HEADS] for each in (*repeated, q)]
    if not args.get("enable_gqa"):
        parts = find_distinct_heads(repeated, heads[-1], constants)
    else:
        is_one = all(isinstance(count, int) for count in heads) and heads[0] == heads[1] != heads[2]
        parts = [*map(DistinctHeads.of, repeated)] if is_one else None
    if parts is None or not all(part.is_used_by(node, READERS) for part in parts):
        return None
    others = [q] if mask is None else [q, mask]
    return _Grouped(node, parts, [region_on(node, parts, others, body, whole=WHOLE) for body in bodies])


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
    by_head = aten.unflatten.int(mask, HEADS, [count, times]) if has_heads else mask.unsqueeze(HEADS)
    sizes = [-1] * (by_head.ndim - 3) + [steps if is_alike else -1, times, -1]
    return aten.flatten.using_ints(by_head.transpose(HEADS, STEPS).expand(sizes), -3, -2)


def _multiply_rows(few: Tensor, q: Tensor) -> Any:
    """Multiply rows [group * steps], which are a view of both the operand and the result if these are dense."""
    rows = aten.flatten.using_ints(aten.unflatten.int(q, HEADS, [few.shape[HEADS], -1]), HEADS, STEPS)
    times = q.shape[HEADS] // few.shape[HEADS]
    return aten.flatten.using_ints(aten.unflatten.int(rows @ few, STEPS, [times, -1]), HEADS - 1, HEADS)


def _bytes_moved(calls: Iterable[fx.Node], device_type: str) -> float:
    """Return the bytes that pass through memory if each of some calls is a kernel, as is a reshape that copies."""
    total = 0.0
    for node in calls:
        operands = [edit.fake(operand) for operand in edit.operands(node)]
        total += sum(map(operator.mul, moves_alone(node), map(_bytes_in_memory, (*operands, *edit.outputs(node)))))
        total += _repeated_reads(node, device_type) if node.target is ATTENTION else 0
        changed = [(operands[0], edit.shape(node))] if node.target in RESHAPES else []
        if node.target is aten.matmul.default:  # it merges batch dims
            changed = [(each, [math.prod(each.shape[:STEPS]), *each.shape[STEPS:]]) for each in operands]
        copied = [value for value, shape in changed if not _is_view(value, shape)]
        total += sum(2 * sym_hint(value.numel()) * value.element_size() for value in copied)
    return total


def _repeated_reads(node: fx.Node, device_type: str) -> int:
    """Return the bytes that a call of attention moves because query heads share heads of keys and values.

    On a CPU every query head reads its keys by itself. On a GPU the kernels without a mask take groups. For groups with
    a mask torch repeats the heads: it writes them, and reads them again.
    """
    args = edit.bound(node)
    keys, values = edit.fake(args["key"]), edit.fake(args["value"])
    times = int(edit.shape(args["query"])[-3]) // int(keys.shape[-3]) if args["enable_gqa"] else 1
    repeated = times * sum(sym_hint(each.numel()) * each.element_size() for each in (keys, values))
    if device_type == "cpu":
        return int(repeated) - sum(map(_bytes_in_memory, (keys, values)))
    return 2 * int(repeated) if times > 1 and args["attn_mask"] is not None else 0


def _bytes_in_memory(value: Tensor) -> int:
    """Return the bytes that a value takes in memory, where an expanded dim occurs once."""
    sizes = (sym_hint(size) for size, stride in zip(value.shape, value.stride(), strict=True) if sym_hint(stride))
    return int(math.prod(sizes)) * value.element_size()


def _is_view(value: Tensor, shape: Sequence[Any]) -> bool:
    """Return True if a change of shape needs no copy."""
    try:
        return value.view(shape) is not None
    except (RuntimeError, ValueError):
        return False
