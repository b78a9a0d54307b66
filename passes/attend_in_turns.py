"""Attention over keys and values that are gathered in turns: a part of every rank's steps at a time."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from tpcompiler._torch import OpOverload, aten, enable_python_dispatcher
from tpcompiler.errors import PlanError
from tpcompiler.ir import edit
from tpcompiler.ir.dim_sharding import DimSharding
from tpcompiler.ir.local import fake_mode_of, key, memory_order
from tpcompiler.ir.program import IN_TURNS, PIN, InTurns, PlannedProgram, Seed, pin
from tpcompiler.ir.sharding import Sharding
from tpcompiler.ir.sizes import statically_equal, sym_quotient

HEADS, STEPS, FEATURES = 1, 2, 3  # of queries, keys and values
KERNEL = aten._scaled_dot_product_flash_attention_for_cpu.default  # `move_device` puts that of another device for it
VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.flatten.using_ints)


def attend_in_turns(program: PlannedProgram) -> PlannedProgram:
    """Write attention that the plan asks to be so as one over each part of the keys, merged as it goes.

    Before    y = scaled_dot_product_attention(q, k, v)      over 2 ranks of cp
    After     q: pinned to S(2)
              part = stack([the first half of every rank's k, that of its v])
              part = pin(pin(part, S(3)), R)                 gathered
              made, scores = kernel(q, part[0], part[1])     scores: log-sum-exp of each query's, [b, h, steps]
              ...                                            and the second half
              y = (made * exp(scores - most) + made_1 * exp(scores_1 - most)) / the sum of both exp

    There are as many turns as ranks, so a rank has a share of the keys beside its own at a time, and never all. Ring
    attention (Liu, Zaharia and Abbeel, 2023) holds and sends as much, a block from neighbour to neighbour; each rank
    would need a graph of its own for it. Here all have one, and every rank sees as many keys in each turn.

    Raises:
        PlanError: a call that the kernel cannot do, or steps that cannot be dealt out.
    """
    graph = edit.copy_graph(program.graph)
    for node in edit.calls(graph):
        if IN_TURNS in node.meta:
            asked: InTurns = node.meta[IN_TURNS]
            ranks = program.mesh.degree(asked.axis)
            if why := _misfit(node, ranks):
                raise PlanError(
                    f"'{node.name}' cannot attend in turns over {asked.axis}={ranks}: {why}",
                    help="leave it out of the plan: all of its keys and values are then gathered at once",
                    asked_by=asked.asked_by,
                    used_at=edit.source_line(node),
                )
            if ranks > 1:
                _Turns(node, asked, ranks).write()
    return replace(program, graph=graph)


def _misfit(node: fx.Node, ranks: int) -> str:
    """Why a call cannot be written so; nothing where it can."""
    args = edit.bound(node)
    q, k, v = (args[name].meta["val"].shape for name in ("query", "key", "value"))
    if args["dropout_p"]:
        return "it drops at random"
    if not len(q) == len(k) == len(v) == 4 or not all(map(statically_equal, (*k, q[0], q[3]), (*v, k[0], k[3]))):
        shapes = ", ".join(str(list(shape)) for shape in (q, k, v))
        return f"it takes {shapes}, and its kernel [batch, heads, steps, features] of one batch and as many features"
    if not isinstance(sym_quotient(q[HEADS], k[HEADS]), int):
        return f"{q[HEADS]} heads of queries are no groups over {k[HEADS]} heads of keys"
    for what, size, parts in (("queries", q[STEPS], ranks), ("keys", k[STEPS], ranks**2)):
        if sym_quotient(size, parts) is None:
            return f"{size} steps of {what} are no multiple of {parts}"
    return ""


@dataclass
class _Turns:
    """Writes, in front of a call, what stands for it over so many ranks."""

    node: fx.Node
    asked: InTurns
    ranks: int

    def write(self) -> None:
        args = edit.bound(self.node)
        q, k, v = (args[name] for name in ("query", "key", "value"))
        k, v = _before_repeat(k, v)
        groups = sym_quotient(q.meta["val"].shape[HEADS], k.meta["val"].shape[HEADS])
        assert isinstance(groups, int)
        q, steps, mask = self.pin(q, STEPS), [self.dealt(each, STEPS) for each in (k, v)], args["attn_mask"]
        if args["is_causal"]:
            queries = self(aten.unsqueeze.default, self.pin(self.places(q), 0), 1)
            columns = self.dealt(self.places(k), 0)
        elif mask is not None and not statically_equal(mask.meta["val"].shape[-1], 1):
            columns = self.dealt(mask, mask.meta["val"].ndim - 1)
        found: tuple[fx.Node, ...] = ()
        for turn in range(self.ranks):
            both = self(aten.stack.default, [self.part(each, STEPS, turn) for each in steps])
            both = self.pin(self.pin(both, 1 + STEPS), None)
            keys, values = (self.repeat(self(aten.select.int, both, 0, at), groups) for at in (0, 1))
            if args["is_causal"]:
                own = self(aten.le.Tensor, self.part(columns, 0, turn), queries)
            elif mask is not None and not statically_equal(mask.meta["val"].shape[-1], 1):
                own = self.part(columns, mask.meta["val"].ndim - 1, turn)
            else:
                own = mask
            found = self.merge(found, *self.attend(q, keys, values, own))
        _, sums, values = found
        sums = self(aten.masked_fill.Scalar, sums, self(aten.eq.Scalar, sums, 0), 1)  # of a query that sees no key
        made = self(aten.div.Tensor, values, self(aten.unsqueeze.default, sums, FEATURES))
        edit.replace_uses(self.node, self.as_made(made))
        edit.erase(self.node)

    def as_made(self, value: fx.Node) -> fx.Node:
        """In the dtype of the call, and laid out as that is: kernels choose how their results lie in memory."""
        made = self.node.meta["val"]
        order = memory_order(made)
        value = self(aten.permute.default, value, order)
        value = self(aten._to_copy.default, value, dtype=made.dtype, memory_format=torch.contiguous_format)
        return self(aten.permute.default, value, [order.index(dim) for dim in range(made.ndim)])

    def dealt(self, value: fx.Node, dim: int) -> fx.Node:
        """A dim of steps as three: of ranks, of turns, and of what one rank gives in one turn."""
        return self(aten.unflatten.int, value, dim, [self.ranks, self.ranks, -1])

    def part(self, dealt: fx.Node, dim: int, turn: int) -> fx.Node:
        """The steps of all ranks in one turn."""
        return self(aten.flatten.using_ints, self(aten.select.int, dealt, dim + 1, turn), dim, dim + 1)

    def places(self, value: fx.Node) -> fx.Node:
        """The place of each step: [steps]."""
        return self(aten.arange.default, self.size(value, STEPS), device=value.meta["val"].device)

    def repeat(self, value: fx.Node, groups: int) -> fx.Node:
        """Heads of keys for all heads of queries."""
        if groups == 1:
            return value
        apart = self(aten.expand.default, self(aten.unsqueeze.default, value, STEPS), [-1, -1, groups, -1, -1])
        return self(aten.flatten.using_ints, apart, HEADS, HEADS + 1)

    def attend(self, q: fx.Node, k: fx.Node, v: fx.Node, mask: fx.Node | None) -> tuple[fx.Node, fx.Node]:
        """What the kernel makes of some keys, and the log-sum-exp of the scores: -inf where a query sees none."""
        bias = mask and self.bias(mask, q.meta["val"].dtype)
        whole = bias and self.expand(bias, [self.size(q, 0), self.size(q, 1), self.size(q, STEPS), self.size(k, STEPS)])
        both = self(KERNEL, q, k, v, attn_mask=whole, scale=edit.bound(self.node)["scale"])
        made, scores = (self(operator.getitem, both, at) for at in (0, 1))
        if bias is None:
            return made, scores
        sees = self(aten.any.dim, self(aten.gt.Scalar, bias, -math.inf), -1)
        blind = self(aten.logical_not.default, sees)
        made = self(aten.masked_fill.Scalar, made, self(aten.unsqueeze.default, blind, -1), 0.0)
        return made, self(aten.masked_fill.Scalar, scores, blind, -math.inf)

    def bias(self, mask: fx.Node, dtype: torch.dtype) -> fx.Node:
        """What is added to the scores: 0 or -inf for a mask of what is seen."""
        if mask.meta["val"].dtype != torch.bool:
            return mask if mask.meta["val"].dtype == dtype else self(aten._to_copy.default, mask, dtype=dtype)
        hidden = self(aten.logical_not.default, mask)
        return self(aten.masked_fill.Scalar, self(aten.full_like.default, mask, 0.0, dtype=dtype), hidden, -math.inf)

    def expand(self, value: fx.Node, sizes: list[Any]) -> fx.Node:
        for _ in range(4 - value.meta["val"].ndim):
            value = self(aten.unsqueeze.default, value, 0)
        return self(aten.expand.default, value, sizes)

    def merge(self, before: tuple[fx.Node, ...], made: fx.Node, scores: fx.Node) -> tuple[fx.Node, ...]:
        """The greatest log-sum-exp of each query so far; relative to it the sum of them all, and of their values.

        In the dtype of the scores, in which the kernel adds up.
        """
        most = self(aten.maximum.default, before[0], scores) if before else scores
        blind = self(aten.eq.Scalar, most, -math.inf)
        finite = self(aten.masked_fill.Scalar, most, blind, 0.0)
        weight = self.weight(scores, finite)
        values = self(aten.mul.Tensor, made, self(aten.unsqueeze.default, weight, FEATURES))
        if not before:
            return most, weight, values
        rescale = self.weight(before[0], finite)
        sums = self(aten.add.Tensor, self(aten.mul.Tensor, before[1], rescale), weight)
        kept = self(aten.mul.Tensor, before[2], self(aten.unsqueeze.default, rescale, FEATURES))
        return most, sums, self(aten.add.Tensor, kept, values)

    def weight(self, scores: fx.Node, most: fx.Node) -> fx.Node:
        return self(aten.exp.default, self(aten.sub.Tensor, scores, most))

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
        name = op.overloadpacket.__name__ if isinstance(op, OpOverload) else op.__name__
        made = edit.insert_before(self.node, op, args, name)
        made.kwargs = kwargs
        given = fx.node.map_arg((args, kwargs), lambda each: each.meta["val"])
        with fake_mode_of(self.node.graph), torch.no_grad(), enable_python_dispatcher():
            made.meta["val"] = op(*given[0], **given[1])
        return made


def _before_repeat(k: fx.Node, v: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Keys and values before their heads were repeated for groups of queries, where they were."""
    few = [_repeated(each) for each in (k, v)]
    if few[0] is None or few[1] is None or key(few[0].meta["val"].shape) != key(few[1].meta["val"].shape):
        return k, v
    return few[0], few[1]


def _repeated(value: fx.Node) -> fx.Node | None:
    """Of what each head was repeated: [b, h, s, d] -> [b, h, 1, s, d] -> [b, h, g, s, d] -> [b, h * g, s, d]."""
    if value.target not in VIEWS:
        return None
    apart: Any = value.args[0]
    expanded: Any = apart.args[0] if apart.target is aten.clone.default else apart
    single: Any = expanded.args[0] if expanded.target is aten.expand.default else expanded
    if single.target is not aten.unsqueeze.default or single.args[1] != STEPS or single is expanded:
        return None
    (b, h, *rest), few = value.meta["val"].shape, single.args[0].meta["val"].shape
    now = expanded.meta["val"].shape
    fits = len(few) == 4 and len(now) == 5
    same = fits and all(map(statically_equal, (b, h, *rest, *rest), (now[0], now[1] * now[2], *now[3:], *few[2:])))
    return single.args[0] if same and statically_equal(few[1], now[1]) else None
