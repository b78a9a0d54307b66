"""Attention in turns: keys and values are gathered a part of every rank's steps at a time."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from tpcompiler._torch import aten, enable_python_dispatcher
from tpcompiler.errors import PlanError
from tpcompiler.ir import edit
from tpcompiler.ir.constraints import Constraint, Over
from tpcompiler.ir.dim_sharding import DimSharding
from tpcompiler.ir.local import fake_mode_of, memory_order
from tpcompiler.ir.program import IN_TURNS, PIN, InTurns, PlannedProgram, pin
from tpcompiler.ir.sharding import Sharding
from tpcompiler.ir.sizes import statically_equal, sym_quotient
from tpcompiler.passes._kernels import ON_CPU
from tpcompiler.passes._turns import FEATURES, HEADS, STEPS, misfit

VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.flatten.using_ints)


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
    if not any(IN_TURNS in node.meta for node in program.graph.nodes):
        return program
    graph = edit.copy_graph(program.graph)
    for node in edit.calls(graph):
        if IN_TURNS not in node.meta:
            continue
        turns: InTurns = node.meta[IN_TURNS]
        ranks = program.mesh.degree(turns.axis)
        if why := misfit(node, turns.axis, program.mesh, device_type):
            raise PlanError(
                f"'{node.name}' cannot attend in turns over {turns.axis}={ranks}: {why}",
                help="leave the module out of the plan, so that keys and values are gathered at once, or pad sizes",
                asked_by=turns.asked_by,
                used_at=edit.source_line(node),
            )
        _Turns(node, turns, ranks).write()
    return replace(program, graph=graph)


@dataclass
class _Turns:
    """A builder that inserts, in front of a call, its replacement over so many ranks."""

    node: fx.Node
    asked: InTurns
    ranks: int

    def write(self) -> None:
        args = edit.bound(self.node)
        q = self.pin(args["query"], STEPS)
        k, v = _before_repeat(args["key"], args["value"])
        merged: tuple[fx.Node, ...] = ()
        for *own, mask in zip(self.parts(k, STEPS), self.parts(v, STEPS), self.masks(k), strict=True):
            both = self.pin(self.pin(self(aten.stack.default, own), 1 + STEPS), None)
            keys, values = (self.for_heads_of(q, self(aten.select.int, both, 0, at)) for at in (0, 1))
            merged = self.merge(merged, *self.attend(q, keys, values, mask))
        _, sums, total = merged
        sums = self(aten.masked_fill.Scalar, sums, self(aten.eq.Scalar, sums, 0), 1)  # a query that sees no key
        quotient = self(aten.div.Tensor, total, self(aten.unsqueeze.default, sums, FEATURES))
        name, result = self.node.name, self.as_made(quotient)
        edit.replace_uses(self.node, result)
        edit.erase(self.node)
        result.name = name  # the same value

    def parts(self, value: fx.Node, dim: int) -> Iterator[fx.Node]:
        """Yield, for each turn, all ranks' parts of a dim of steps."""
        by_rank_and_turn = self(aten.unflatten.int, value, dim, [self.ranks, self.ranks, -1])
        for turn in range(self.ranks):
            yield self(aten.flatten.using_ints, self(aten.select.int, by_rank_and_turn, dim + 1, turn), dim, dim + 1)

    def masks(self, k: fx.Node) -> Iterator[fx.Node | None]:
        """Yield, for each turn, the mask of its keys: visibility per query, or numbers added to the scores."""
        args = edit.bound(self.node)
        mask: fx.Node | None = args["attn_mask"]
        if args["is_causal"]:
            rows = self(aten.unsqueeze.default, self.pin(self.places(args["query"]), 0), 1)
            for columns in self.parts(self.places(k), 0):
                yield self(aten.le.Tensor, columns, rows)
        elif mask is None or statically_equal(edit.shape(mask)[-1], 1):
            yield from itertools.repeat(mask, self.ranks)
        else:
            yield from self.parts(mask, edit.ndim(mask) - 1)

    def places(self, value: fx.Node) -> fx.Node:
        """Return the position of each step: [steps]."""
        return self(aten.arange.default, self.size(value, STEPS), device=edit.fake(value).device)

    def for_heads_of(self, q: fx.Node, value: fx.Node) -> fx.Node:
        """Repeat each head of keys for its group of query heads."""
        groups = sym_quotient(edit.shape(q)[HEADS], edit.shape(value)[HEADS])
        if statically_equal(groups, 1):
            return value
        apart = self(aten.expand.default, self(aten.unsqueeze.default, value, STEPS), [-1, -1, groups, -1, -1])
        return self(aten.flatten.using_ints, apart, HEADS, HEADS + 1)

    def attend(self, q: fx.Node, k: fx.Node, v: fx.Node, mask: fx.Node | None) -> tuple[fx.Node, fx.Node]:
        """Return the kernel's result for some keys, and the scores' log-sum-exp: -inf if a query sees none of them."""
        bias = None if mask is None else self.as_bias(mask, edit.fake(q).dtype)
        whole = None if bias is None else self.expand(bias, q, k)
        both = self(ON_CPU, q, k, v, attn_mask=whole, scale=edit.bound(self.node)["scale"])
        result, scores = (self(operator.getitem, both, at) for at in (0, 1))
        if mask is None or bias is None:
            return result, scores
        sees = mask if edit.fake(mask).dtype == torch.bool else self(aten.gt.Scalar, bias, -math.inf)
        blind = self(aten.logical_not.default, self(aten.any.dim, sees, -1))
        return result, self(aten.masked_fill.Scalar, scores, blind, -math.inf)  # kernels return 0 for such a query

    def as_bias(self, mask: fx.Node, dtype: torch.dtype) -> fx.Node:
        """Return the mask as the kernel takes it: -inf for hidden keys."""
        value = edit.fake(mask)
        if value.dtype != torch.bool:
            return mask if value.dtype == dtype else self(aten._to_copy.default, mask, dtype=dtype)
        numbers = [self(aten.full.default, [], each, dtype=dtype, device=value.device) for each in (0.0, -math.inf)]
        return self(aten.where.self, mask, *numbers)

    def expand(self, bias: fx.Node, q: fx.Node, k: fx.Node) -> fx.Node:
        """Expand the bias to all samples and heads: [batch, heads, steps of queries, steps of keys]."""
        for _ in range(4 - edit.ndim(bias)):
            bias = self(aten.unsqueeze.default, bias, 0)
        sizes = [*(self.size(q, dim) for dim in range(FEATURES)), self.size(k, STEPS)]
        return self(aten.expand.default, bias, sizes)

    def merge(self, before: tuple[fx.Node, ...], made: fx.Node, scores: fx.Node) -> tuple[fx.Node, ...]:
        """Return each query's greatest log-sum-exp so far, and the sums of weights and weighted values relative to it.

        Computed in the dtype of the scores, in which the kernel accumulates.
        """
        most = self(aten.maximum.default, before[0], scores) if before else scores
        finite = self(aten.masked_fill.Scalar, most, self(aten.eq.Scalar, most, -math.inf), 0.0)
        weight, weights = self.weight(scores, finite)
        if not before:
            return most, weight, self(aten.mul.Tensor, made, weights)
        rescale, rescales = self.weight(before[0], finite)
        sums = self(aten.addcmul.default, weight, before[1], rescale)
        return most, sums, self(aten.addcmul.default, self(aten.mul.Tensor, before[2], rescales), made, weights)

    def weight(self, scores: fx.Node, most: fx.Node) -> tuple[fx.Node, fx.Node]:
        """Return weights relative to the greatest log-sum-exp, per query, and broadcast over its features."""
        weights = self(aten.exp.default, self(aten.sub.Tensor, scores, most))
        return weights, self(aten.unsqueeze.default, weights, FEATURES)

    def as_made(self, value: fx.Node) -> fx.Node:
        """Return the value in the dtype and memory order of the call, because kernels choose their results' layout."""
        original = edit.fake(self.node)
        order = memory_order(original)
        value = self(aten.permute.default, value, order)
        value = self(aten._to_copy.default, value, dtype=original.dtype, memory_format=torch.contiguous_format)
        return self(aten.permute.default, value, [order.index(dim) for dim in range(original.ndim)])

    def pin(self, value: fx.Node, dim: int | None) -> fx.Node:
        """Return the value, pinned to be sharded along a dim over the axis, or to be whole over it."""
        whole, node = Sharding.replicated(edit.ndim(value)), self(pin, value)
        sharding = whole if dim is None else whole.with_dim(dim, DimSharding.by(self.asked.axis))
        node.meta[PIN] = Constraint(Over((sharding,), (self.asked.axis,)), self.asked.asked_by)
        return node

    def size(self, value: fx.Node, dim: int) -> Any:
        size = edit.shape(value)[dim]
        return size if isinstance(size, int) else self(aten.sym_size.int, value, dim)

    def __call__(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Insert a call and compute its fake value."""
        node = edit.insert_before(self.node, op, args, op.__name__.partition(".")[0])
        node.kwargs = kwargs
        values = fx.node.map_arg((args, kwargs), lambda each: edit.fake(each))
        with fake_mode_of(self.node.graph), torch.no_grad(), enable_python_dispatcher():
            node.meta["val"] = op(*values[0], **values[1])
        return node


def _before_repeat(k: fx.Node, v: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Return keys and values without the repetition of heads for query groups, if both were repeated."""
    keys, values = _source_of_repeat(k), _source_of_repeat(v)
    if keys is None or values is None:
        return k, v
    same = statically_equal(edit.shape(keys)[HEADS], edit.shape(values)[HEADS])
    return (keys, values) if same else (k, v)


def _source_of_repeat(value: fx.Node) -> fx.Node | None:
    """Return the heads before repetition: [b, h, s, d] -> [b, h, 1, s, d] -> [b, h, g, s, d] -> [b, h * g, s, d]."""
    expanded: Any = value.args[0] if value.target in VIEWS else None
    if expanded is not None and expanded.target is aten.clone.default:
        expanded = expanded.args[0]
    single: Any = expanded.args[0] if expanded is not None and expanded.target is aten.expand.default else None
    if single is None or single.target is not aten.unsqueeze.default or single.args[1] != STEPS:
        return None
    few: fx.Node = single.args[0]
    (b, h, s, d), groups = edit.shape(few), edit.shape(expanded)[STEPS]
    same = edit.ndim(value) == 4 and all(map(statically_equal, edit.shape(value), (b, h * groups, s, d)))
    return few if same else None
