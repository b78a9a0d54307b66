"""Parts of a program that torch code computes in other ops.

All rewrites of this kind are one mechanism. A matcher finds a region, which has a body in torch code on whole values;
`write` traces the body and puts its ops in the region's place. Each of these ops has a rule, so the search places and
prices them like all others. A body may also pin a value (`pinned`), to say where a collective belongs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import fx

from tpcompiler._torch import OpOverload, define_op, functional_op, keeping_whole, trace_ops, tree_flatten, untraced
from tpcompiler.errors import UnsupportedError
from tpcompiler.ir import edit
from tpcompiler.ir.constraints import Constraint, Over
from tpcompiler.ir.dim_sharding import DimSharding
from tpcompiler.ir.draws import remove_unused
from tpcompiler.ir.local import fake_mode_of, is_contiguous, memory_order, no_new_guards, same_layout
from tpcompiler.ir.program import PIN, PlannedProgram, pin
from tpcompiler.ir.sharding import Sharding


@dataclass(frozen=True)
class Region:
    """A call and the calls before it that only it uses, with torch code that computes the same.

    Attributes:
        node: the call whose results the body returns.
        inputs: the values from outside, one for each parameter of the body.
        body: takes and returns whole values, not shards. A tuple stands for all outputs of `node`. It returns
            NotImplemented for a region that it does not support.
        whole: composite ops that the trace does not decompose.
        asked_by: who asked for it, and for the placements that its body pins; empty if nobody did.
    """

    node: fx.Node
    inputs: Sequence[fx.Node]
    body: Callable[..., Any]
    whole: tuple[OpOverload, ...] = ()
    asked_by: str = ""

    @property
    def results(self) -> list[fx.Node]:
        """Return the values that the body replaces: the call, or the used ones of its outputs."""
        return [self.node] if edit.is_tensor(self.node) else list(self.node.users)

    def trace(self) -> fx.Graph | None:
        """Return the ops of the body, in the memory order of the results; None if it supports no such region."""
        orders = [_order_of(edit.fake(result)) for result in self.results]

        def run(*values: Any) -> Any:
            made = self.body(*values)
            if made is NotImplemented:
                raise _Declined
            if edit.is_tensor(self.node):
                return _in_order(made, orders[0])
            parts = [made[result.args[1]] for result in self.results]
            return [_in_order(value, order) for value, order in zip(parts, orders, strict=True)]

        with fake_mode_of(self.node.graph), torch.no_grad(), keeping_whole(*self.whole):
            given = [edit.fake(value) for value in self.inputs]
            values = [same_layout(value) for value in given]
            try:
                body = trace_ops(run, *values)
            except _Declined:
                return None
        _write_nothing_in_place(body)
        edit.count_slices_from_start(body)
        body.eliminate_dead_code()
        numbers = tree_flatten([(inner.args, inner.kwargs) for inner in body.nodes])[0]
        return None if any(isinstance(number, torch.SymInt) for number in numbers) else body

    def write(self) -> list[fx.Node]:
        """Replace the region by the ops of its body. Return these; none if the body does not support the region.

        Raises:
            UnsupportedError: a plan asks for it, and torch cannot trace its body.
        """
        body = self.trace()
        if body is None and self.asked_by:
            raise UnsupportedError(
                f"'{self.node.name}' cannot be written in other ops, as {self.asked_by} asks",
                help="remove that entry of the plan",
            )
        return [] if body is None else self.put(body)

    def put(self, body: fx.Graph) -> list[fx.Node]:
        """Replace the region by a body that was traced before, for this region or for one alike."""
        inserted = edit.rewrite(self.node, body, self.inputs)
        for node in inserted:
            if node.target is PINNED:
                self._pin(node)
        return inserted

    def _pin(self, node: fx.Node) -> None:
        """Turn a call of `pinned` into a `pin` node."""
        value, axis, dim = cast(tuple[fx.Node, str, int | None], node.args)
        whole = Sharding.replicated(edit.ndim(node))
        sharding = whole if dim is None else whole.with_dim(dim, DimSharding.by(axis))
        node.target, node.args = pin, (value,)
        edit.record(node, edit.fake(value))
        node.meta[PIN] = Constraint(Over((sharding,), (axis,)), self.asked_by)


def write_regions(program: PlannedProgram, find: Callable[[fx.Graph], Iterator[Region]]) -> PlannedProgram:
    """Return the program with the regions that `find` yields in the ops of their bodies.

    A region that its body does not support stays as it is. Each is written before the next one is looked for.
    """
    graph = edit.copy_graph(program.graph)
    with no_new_guards(graph):
        for region in find(graph):
            region.write()
    remove_unused(graph)
    return replace(program, graph=graph)


class _Declined(Exception):
    """The body does not support the region."""


def pinned(value: torch.Tensor, axis: str, dim: int | None) -> torch.Tensor:
    """Return the value, in a body: sharded along a dim over an axis of the mesh, or whole over it."""
    result: torch.Tensor = PINNED(value, axis, dim)
    return result


def _fake(value: torch.Tensor, axis: str, dim: int | None) -> torch.Tensor:
    return same_layout(value)


PINNED = define_op("pin(Tensor value, str axis, int? dim) -> Tensor", lambda value, axis, dim: value.clone(), _fake)


def _write_nothing_in_place(body: fx.Graph) -> None:
    """Replace in-place ops of `torch.vmap` by functional ones; nothing reads the old values of their operands."""
    for node in edit.calls(body):
        if isinstance(node.target, OpOverload) and node.target._schema.is_mutable:
            node.target = functional_op(node.target) or node.target


def _order_of(value: torch.Tensor) -> list[int] | None:
    """Return the order of the dims of a dense value in memory."""
    order = memory_order(value)
    return order if is_contiguous(value.permute(order)) else None


def _in_order(value: torch.Tensor, order: list[int] | None) -> torch.Tensor:
    """Return a tensor with its dims in memory in this order."""
    with untraced():
        if order is None or is_contiguous(value.permute(order)):
            return value
    if order == sorted(order):
        return value.contiguous()
    return value.permute(order).contiguous().permute([order.index(dim) for dim in range(value.ndim)])
