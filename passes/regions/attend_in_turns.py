"""Attention in turns: keys and values are gathered a part of every rank's steps at a time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from tpcompiler._torch import aten
from tpcompiler.errors import PlanError
from tpcompiler.ir import edit
from tpcompiler.ir.local import memory_order
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.program import IN_TURNS, AxisRequest, PlannedProgram
from tpcompiler.ir.region import Region, pinned, write_regions
from tpcompiler.ir.sizes import statically_equal, sym_quotient
from tpcompiler.passes._distinct_heads import DistinctHeads, find_distinct_heads, region_on
from tpcompiler.plan.plan import PlanEntry
from tpcompiler.rules.attention import CPU_KERNEL

HEADS, STEPS, FEATURES = 1, 2, 3  # dims of queries, keys and values: [batch, heads, steps, features]
# Required multiples: steps of queries (log-sum-exps may be padded to it), steps of keys, features.
MULTIPLES = {"cpu": (1, 1, 1), "cuda": (32, 8, 8)}
ATTENTION = aten.scaled_dot_product_attention.default
WHOLE = (aten.unflatten.int, aten.flatten.using_ints, aten.reshape.default)


def attend_in_turns(program: PlannedProgram, device_type: str = "cpu") -> PlannedProgram:
    """Write requested attention calls as attention to one part of the keys after the other.

    Before    y = scaled_dot_product_attention(q, k, v)      over 2 ranks of cp
    After     part = stack([the first half of every rank's k, that of its v])
              part = pin(pin(part, S(3)), R)                 gathered
              made, scores = kernel(q, part[0], part[1])     q: pinned to S(2); scores: [b, h, steps], log-sum-exp
              ...                                            the same of the second half
              y = (made * exp(scores - most) + made_1 * exp(scores_1 - most)) / the sum of both exp

    There are as many turns as ranks, so a rank holds one more share of the keys at a time, and never all. Ring
    attention (Liu, Zaharia and Abbeel, 2023) holds and sends as much, a block from neighbour to neighbour, but needs a
    graph per rank; here all ranks share one. The plan requests it, or the search does if the keys gathered at once
    would not fit.

    Raises:
        PlanError: a call that the kernel does not support, or steps that cannot be dealt out evenly.
    """
    return write_regions(program, partial(_find_attention, program.mesh, device_type))


def _find_attention(mesh: Mesh, device_type: str, graph: fx.Graph) -> Iterator[Region]:
    for node in edit.calls(graph):
        turns: AxisRequest | None = node.meta.get(IN_TURNS)
        if turns is None:
            continue
        ranks = mesh.degree(turns.axis)
        if why := misfit(node, turns.axis, mesh, device_type):
            raise PlanError(
                f"'{node.name}' cannot attend in turns over {turns.axis}={ranks}: {why}",
                help="leave the module out of the plan, so that keys and values are gathered at once, or pad sizes",
                asked_by=turns.asked_by,
                used_at=edit.source_line(node),
            )
        args = edit.bound(node)
        mask = [] if args["attn_mask"] is None else [args["attn_mask"]]
        both = [args["key"], args["value"]]
        parts = find_distinct_heads(both, edit.shape(args["query"])[HEADS], {}) or [*map(DistinctHeads.of, both)]
        made = edit.fake(node).dtype, memory_order(edit.fake(node))
        body = _Turns(turns.axis, ranks, args["is_causal"], args["scale"], *made)
        yield region_on(node, parts, [args["query"], *mask], body.attend, whole=WHOLE, asked_by=turns.asked_by)


@dataclass(frozen=True)
class _Turns:
    """Attention over so many ranks in as many turns; `dtype` and `order` in memory: those of the call's result."""

    axis: str
    ranks: int
    is_causal: bool
    scale: float | None
    dtype: torch.dtype
    order: list[int]

    def attend(self, k: Tensor, v: Tensor, q: Tensor, mask: Tensor | None = None) -> Tensor:
        q = pinned(q, self.axis, STEPS)
        merged: tuple[Tensor, ...] = ()
        for *own, seen in zip(self.parts(k, STEPS), self.parts(v, STEPS), self.masks(q, k, mask), strict=True):
            both = pinned(pinned(torch.stack(own), self.axis, 1 + STEPS), self.axis, None)
            keys, values = (_repeat_heads(both[at], q) for at in (0, 1))
            merged = _merge(merged, *_attend(q, keys, values, seen, self.scale))
        _, sums, total = merged
        sums = sums.masked_fill(sums == 0, 1)  # a query that sees no key
        return self.as_result(total / sums.unsqueeze(FEATURES))

    def parts(self, value: Tensor, dim: int) -> Iterator[Tensor]:
        """Yield, for each turn, all ranks' parts of a dim of steps."""
        by_rank_and_turn = aten.unflatten.int(value, dim, [self.ranks, self.ranks, -1])
        for turn in range(self.ranks):
            yield by_rank_and_turn.select(dim + 1, turn).flatten(dim, dim + 1)

    def masks(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Iterator[Tensor | None]:
        """Yield, for each turn, the mask of its keys: visibility per query, or numbers added to the scores."""
        if self.is_causal:
            rows = pinned(_places(q), self.axis, 0).unsqueeze(1)
            for columns in self.parts(_places(k), 0):
                yield columns <= rows
        elif mask is None or statically_equal(mask.shape[-1], 1):
            yield from itertools.repeat(mask, self.ranks)
        else:
            yield from self.parts(mask, mask.ndim - 1)

    def as_result(self, value: Tensor) -> Tensor:
        """Return the value in the dtype and memory order of the call, because kernels choose their results' layout."""
        value = value.permute(self.order)
        value = aten._to_copy.default(value, dtype=self.dtype, memory_format=torch.contiguous_format)
        return value.permute([self.order.index(dim) for dim in range(value.ndim)])


def _places(value: Tensor) -> Tensor:
    """Return the position of each step: [steps]."""
    return torch.arange(value.shape[STEPS], device=value.device)


def _repeat_heads(value: Tensor, q: Tensor) -> Tensor:
    """Repeat each head of keys for its group of query heads."""
    groups: Any = sym_quotient(q.shape[HEADS], value.shape[HEADS])
    if statically_equal(groups, 1):
        return value
    return value.unsqueeze(STEPS).expand(-1, -1, groups, -1, -1).flatten(HEADS, HEADS + 1)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> tuple[Tensor, Tensor]:
    """Return the kernel's result for some keys, and the scores' log-sum-exp: -inf if a query sees none of them."""
    if mask is None:
        result, scores = CPU_KERNEL(q, k, v, scale=scale)
        return result, scores
    bias = _as_bias(mask, q.dtype)
    expanded = bias.expand(*q.shape[:FEATURES], k.shape[STEPS])
    result, scores = CPU_KERNEL(q, k, v, attn_mask=expanded, scale=scale)
    sees = mask if mask.dtype == torch.bool else bias > -math.inf
    return result, scores.masked_fill(~sees.any(-1), -math.inf)  # kernels return 0 for such a query


def _as_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask as the kernel takes it: -inf for hidden keys."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    seen, hidden = (torch.full([], each, dtype=dtype, device=mask.device) for each in (0.0, -math.inf))
    return torch.where(mask, seen, hidden)


def _merge(before: tuple[Tensor, ...], made: Tensor, scores: Tensor) -> tuple[Tensor, ...]:
    """Return each query's greatest log-sum-exp so far, and the sums of weights and weighted values relative to it.

    Computed in the dtype of the scores, in which the kernel accumulates.
    """
    most = torch.maximum(before[0], scores) if before else scores
    finite = most.masked_fill(most == -math.inf, 0.0)
    weight = (scores - finite).exp()
    weights = weight.unsqueeze(FEATURES)
    if not before:
        return most, weight, made * weights
    rescale = (before[0] - finite).exp()
    rescales = rescale.unsqueeze(FEATURES)
    sums = torch.addcmul(weight, before[1], rescale)
    return most, sums, torch.addcmul(before[2] * rescales, made, weights)


def ask_for_turns(inside: Iterable[fx.Node], name: str, entry: PlanEntry, mesh: Mesh) -> None:
    """Note on the attention calls inside a module that its style requests turns, if it does.

    Raises:
        PlanError: the module calls no attention.
    """
    if not entry.style.in_turns:
        return
    attention = [node for node in inside if node.target is ATTENTION]
    if not attention:
        raise PlanError(
            f"style '{entry.style.name}' does not fit '{name}': it calls no scaled_dot_product_attention",
            help="name the module that attends, of a program as torch.export gives it",
            asked_by=entry.where,
        )
    for node in attention:
        node.meta[IN_TURNS] = AxisRequest(entry.style.axis_on(mesh), entry.where)


def dealt_out(node: fx.Node, axis: str, mesh: Mesh, device_type: str) -> Iterator[tuple[str, fx.Node, int]]:
    """Yield the operands of a call whose steps are dealt out, with a name and the required multiple.

    Each rank has some of the keys in each turn.
    """
    ranks, args = mesh.degree(axis), edit.bound(node)
    queries, keys, _ = MULTIPLES[device_type]
    for what, operand, each in (("queries", args["query"], queries), ("keys", args["key"], math.lcm(ranks, keys))):
        if edit.ndim(operand) == 4:
            yield what, operand, ranks * each


def misfit(node: fx.Node, axis: str, mesh: Mesh, device_type: str, dynamic: bool = False) -> str:
    """Return why a call cannot be written in turns, or "". `dynamic`: such sizes will be divided later."""
    args = edit.bound(node)
    if mesh.is_unequal([axis]):
        return f"{mesh} has unequal shares, and turns are of equal shares of the steps"
    q, k, v = (edit.shape(args[name]) for name in ("query", "key", "value"))
    if not len(q) == len(k) == len(v) == 4 or not all(map(statically_equal, (*k, q[0], q[3]), (*v, k[0], k[3]))):
        shapes = ", ".join(str(list(shape)) for shape in (q, k, v))
        return f"it takes {shapes}, and must take [batch, heads, steps, features] of as many samples and features"
    if not isinstance(sym_quotient(q[HEADS], k[HEADS]), int):
        return f"{q[HEADS]} heads of queries are no groups over {k[HEADS]} heads of keys"
    sizes = [("features", args["query"], FEATURES, MULTIPLES[device_type][-1])]
    sizes += [
        (f"steps of {what}", each, STEPS, parts) for what, each, parts in dealt_out(node, axis, mesh, device_type)
    ]
    for what, operand, dim, multiple in sizes:
        size = edit.shape(operand)[dim]
        if sym_quotient(size, multiple) is None and not (dynamic and not isinstance(size, int)):
            return f"{size} {what} are no multiple of {multiple}, as that many ranks on {device_type} need"
    return ""
