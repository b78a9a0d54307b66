"""Attention over keys and values that are gathered in turns: a part of every rank's steps at a time."""

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
from tpcompiler.ir.dim_sharding import DimSharding
from tpcompiler.ir.local import fake_mode_of, memory_order
from tpcompiler.ir.program import IN_TURNS, PIN, InTurns, PlannedProgram, Seed, pin
from tpcompiler.ir.sharding import Sharding
from tpcompiler.ir.sizes import statically_equal, sym_quotient
from tpcompiler.passes._kernels import ON_CPU
from tpcompiler.passes._turns import FEATURES, HEADS, STEPS, misfit

VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.flatten.using_ints)


def attend_in_turns(program: PlannedProgram, device_type: str = "cpu") -> PlannedProgram:
    """Write attention that the plan wants so as attention to one part of the keys after the other.

    Before    y = scaled_dot_product_attention(q, k, v)      over 2 ranks of cp
    After     part = stack([the first half of every rank's k, that of its v])
              part = pin(pin(part, S(3)), R)                 gathered
              made, scores = kernel(q, part[0], part[1])     q: pinned to S(2); scores: [b, h, steps], log-sum-exp
              ...                                            the same of the second half
              y = (made * exp(scores - most) + made_1 * exp(scores_1 - most)) / the sum of both exp

    There are as many turns as ranks, so a rank has a share of the keys beside its own at a time, and never all. Ring
    attention (Liu, Zaharia and Abbeel, 2023) holds and sends as much, a block from neighbour to neighbour; each rank
    would need a graph of its own for it. Here all have one. What makes a call so is the plan, or the search where what
    is gathered at once does not fit.

    Raises:
        PlanError: a call that the kernel cannot do, or steps that cannot be dealt out evenly.
    """
    if not any(IN_TURNS in node.meta for node in program.graph.nodes):
        return program
    graph = edit.copy_graph(program.graph)
    for node in edit.calls(graph):
        if IN_TURNS not in node.meta:
            continue
        asked: InTurns = node.meta[IN_TURNS]
        ranks = program.mesh.degree(asked.axis)
        if why := misfit(node, asked.axis, program.mesh, device_type):
            raise PlanError(
                f"'{node.name}' cannot attend in turns over {asked.axis}={ranks}: {why}",
                help="leave the module out of the plan, so that keys and values are gathered at once, or pad sizes",
                asked_by=asked.asked_by,
                used_at=edit.source_line(node),
            )
        _Turns(node, asked, ranks).write()
    return replace(program, graph=graph)


@dataclass
class _Turns:
    """Writes, in front of a call, what stands for it over so many ranks."""

    node: fx.Node
    asked: InTurns
    ranks: int

    def write(self) -> None:
        args = edit.bound(self.node)
        q = self.pin(args["query"], STEPS)
        k, v = _before_repeat(args["key"], args["value"])
        found: tuple[fx.Node, ...] = ()
        for *own, mask in zip(self.parts(k, STEPS), self.parts(v, STEPS), self.masks(k), strict=True):
            both = self.pin(self.pin(self(aten.stack.default, own), 1 + STEPS), None)
            keys, values = (self.for_heads_of(q, self(aten.select.int, both, 0, at)) for at in (0, 1))
            found = self.merge(found, *self.attend(q, keys, values, mask))
        _, sums, total = found
        sums = self(aten.masked_fill.Scalar, sums, self(aten.eq.Scalar, sums, 0), 1)  # of a query that sees no key
        made = self(aten.div.Tensor, total, self(aten.unsqueeze.default, sums, FEATURES))
        name, result = self.node.name, self.as_made(made)
        edit.replace_uses(self.node, result)
        edit.erase(self.node)
        result.name = name  # it is the same value

    def parts(self, value: fx.Node, dim: int) -> Iterator[fx.Node]:
        """Of a dim of steps those of all ranks in each turn."""
        dealt = self(aten.unflatten.int, value, dim, [self.ranks, self.ranks, -1])
        for turn in range(self.ranks):
            yield self(aten.flatten.using_ints, self(aten.select.int, dealt, dim + 1, turn), dim, dim + 1)

    def masks(self, k: fx.Node) -> Iterator[fx.Node | None]:
        """What each query sees of the keys of each turn, or what is added to its scores with them."""
        args = edit.bound(self.node)
        mask: fx.Node | None = args["attn_mask"]
        if args["is_causal"]:
            rows = self(aten.unsqueeze.default, self.pin(self.places(args["query"]), 0), 1)
            for columns in self.parts(self.places(k), 0):
                yield self(aten.le.Tensor, columns, rows)
        elif mask is None or statically_equal(mask.meta["val"].shape[-1], 1):
            yield from itertools.repeat(mask, self.ranks)
        else:
            yield from self.parts(mask, mask.meta["val"].ndim - 1)

    def places(self, value: fx.Node) -> fx.Node:
        """The place of each step: [steps]."""
        return self(aten.arange.default, self.size(value, STEPS), device=value.meta["val"].device)

    def for_heads_of(self, q: fx.Node, value: fx.Node) -> fx.Node:
        """Heads of keys, each repeated for a group of heads of queries."""
        groups = sym_quotient(q.meta["val"].shape[HEADS], value.meta["val"].shape[HEADS])
        if statically_equal(groups, 1):
            return value
        apart = self(aten.expand.default, self(aten.unsqueeze.default, value, STEPS), [-1, -1, groups, -1, -1])
        return self(aten.flatten.using_ints, apart, HEADS, HEADS + 1)

    def attend(self, q: fx.Node, k: fx.Node, v: fx.Node, mask: fx.Node | None) -> tuple[fx.Node, fx.Node]:
        """What the kernel makes of some keys, and the log-sum-exp of their scores: -inf where a query sees none."""
        bias = None if mask is None else self.as_bias(mask, q.meta["val"].dtype)
        whole = None if bias is None else self.expand(bias, q, k)
        both = self(ON_CPU, q, k, v, attn_mask=whole, scale=edit.bound(self.node)["scale"])
        made, scores = (self(operator.getitem, both, at) for at in (0, 1))
        if mask is None or bias is None:
            return made, scores
        sees = mask if mask.meta["val"].dtype == torch.bool else self(aten.gt.Scalar, bias, -math.inf)
        blind = self(aten.logical_not.default, self(aten.any.dim, sees, -1))
        return made, self(aten.masked_fill.Scalar, scores, blind, -math.inf)  # kernels say 0 of such a query

    def as_bias(self, mask: fx.Node, dtype: torch.dtype) -> fx.Node:
        """As the kernel takes it: what is not seen is -inf."""
        value = mask.meta["val"]
        if value.dtype != torch.bool:
            return mask if value.dtype == dtype else self(aten._to_copy.default, mask, dtype=dtype)
        numbers = [self(aten.full.default, [], each, dtype=dtype, device=value.device) for each in (0.0, -math.inf)]
        return self(aten.where.self, mask, *numbers)

    def expand(self, bias: fx.Node, q: fx.Node, k: fx.Node) -> fx.Node:
        """For every sample and head: [batch, heads, steps of queries, of keys]."""
        for _ in range(4 - bias.meta["val"].ndim):
            bias = self(aten.unsqueeze.default, bias, 0)
        sizes = [*(self.size(q, dim) for dim in range(FEATURES)), self.size(k, STEPS)]
        return self(aten.expand.default, bias, sizes)

    def merge(self, before: tuple[fx.Node, ...], made: fx.Node, scores: fx.Node) -> tuple[fx.Node, ...]:
        """The greatest log-sum-exp of a query so far; the sum of all, and of their values, in units of that.

        In the dtype of the scores, in which the kernel adds up.
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
        """In units of the greatest, for each query and for its features."""
        made = self(aten.exp.default, self(aten.sub.Tensor, scores, most))
        return made, self(aten.unsqueeze.default, made, FEATURES)

    def as_made(self, value: fx.Node) -> fx.Node:
        """In the dtype of the call, and laid out as that is: kernels choose how their results lie in memory."""
        made = self.node.meta["val"]
        order = memory_order(made)
        value = self(aten.permute.default, value, order)
        value = self(aten._to_copy.default, value, dtype=made.dtype, memory_format=torch.contiguous_format)
        return self(aten.permute.default, value, [order.index(dim) for dim in range(made.ndim)])

    def pin(self, value: fx.Node, dim: int | None) -> fx.Node:
        """The value cut along a dim over the axis, or whole over it."""
        dims = list(Sharding.replicated(value.meta["val"].ndim).dims)
        if dim is not None:
            dims[dim] = DimSharding.by(self.asked.axis)
        made = self(pin, value)
        made.meta[PIN] = Seed(Sharding(tuple(dims)), self.asked.asked_by, (self.asked.axis,))
        return made

    def size(self, value: fx.Node, dim: int) -> Any:
        size = value.meta["val"].shape[dim]
        return size if isinstance(size, int) else self(aten.sym_size.int, value, dim)

    def __call__(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A call, with what it makes."""
        made = edit.insert_before(self.node, op, args, op.__name__.partition(".")[0])
        made.kwargs = kwargs
        given = fx.node.map_arg((args, kwargs), lambda each: each.meta["val"])
        with fake_mode_of(self.node.graph), torch.no_grad(), enable_python_dispatcher():
            made.meta["val"] = op(*given[0], **given[1])
        return made


def _before_repeat(k: fx.Node, v: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Keys and values before their heads were repeated for groups of queries, where both were."""
    keys, values = _repeated(k), _repeated(v)
    if keys is None or values is None:
        return k, v
    same = statically_equal(keys.meta["val"].shape[HEADS], values.meta["val"].shape[HEADS])
    return (keys, values) if same else (k, v)


def _repeated(value: fx.Node) -> fx.Node | None:
    """Of what heads were repeated: [b, h, s, d] -> [b, h, 1, s, d] -> [b, h, g, s, d] -> [b, h * g, s, d]."""
    expanded: Any = value.args[0] if value.target in VIEWS else None
    if expanded is not None and expanded.target is aten.clone.default:
        expanded = expanded.args[0]
    single: Any = expanded.args[0] if expanded is not None and expanded.target is aten.expand.default else None
    if single is None or single.target is not aten.unsqueeze.default or single.args[1] != STEPS:
        return None
    few: fx.Node = single.args[0]
    (b, h, s, d), groups = few.meta["val"].shape, expanded.meta["val"].shape[STEPS]
    same = value.meta["val"].ndim == 4 and all(map(statically_equal, value.meta["val"].shape, (b, h * groups, s, d)))
    return few if same else None
