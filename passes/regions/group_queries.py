"""Grouped queries: attention reads the heads of keys and values as they are stored, not repeated for their queries."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from tpcompiler._torch import OpOverload, aten
from tpcompiler.cost.kernels import find_kernels
from tpcompiler.cost.objective import stored_bytes
from tpcompiler.ir import edit
from tpcompiler.ir.dim_sharding import DimSharding
from tpcompiler.ir.draws import remove_unused
from tpcompiler.ir.local import key, memory_order, no_new_guards
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.program import IN_TURNS, Note, PlannedProgram
from tpcompiler.ir.region import Region
from tpcompiler.ir.sharding import Sharding
from tpcompiler.ir.sizes import statically_equal
from tpcompiler.passes._kernels import reads_of_groups
from tpcompiler.rules.infer import Refusal, follow, shardings
from tpcompiler.rules.registry import rule_of
from tpcompiler.terminal.printed import format_bytes

HEADS, STEPS = -3, -2  # dims of queries, keys and values: [..., heads, steps, features]
GROUP = "group"  # the axis whose ranks would hold the equal heads of a group
ATTENTION = aten.scaled_dot_product_attention.default
PRODUCTS = (aten.matmul.default, aten.bmm.default)
COPIES = (aten.clone.default, aten.alias.default, aten.lift_fresh_copy.default)
RESHAPES = (*edit.VIEWS, aten.flatten.using_ints, aten.unflatten.int)
WHOLE = (ATTENTION, aten.flatten.using_ints, aten.unflatten.int, aten.reshape.default, aten.matmul.default)
Values = Mapping[tuple[fx.Node, bool], Tensor]


def group_queries(program: PlannedProgram, device_type: str = "cpu") -> PlannedProgram:
    """Let attention read each head of keys and values once, where a program repeats it for a group of query heads.

    Before    keys = reshape(expand(unsqueeze(k, 2), [b, 2, 4, t, d]), [b, 8, t, d]); values likewise
              y = scaled_dot_product_attention(q, keys, values, mask)      q: [b, 8, s, d], k: [b, 2, t, d]
    After     rows = flatten(transpose(unflatten(q, 1, [2, 4]), 2, 3), 2, 3)      [b, 2, s * 4, d]
              y = scaled_dot_product_attention(rows, k, v, each row of the mask 4 times), in the order of q again

    The queries that share a head become more rows of that head; or, where the device's kernels take groups, the call
    gets `enable_gqa`. A product with a repeated operand, as in attention that is written out, is written likewise. A
    repetition is any chain of ops on heads that are equal in groups, by the rules of these ops (`_DistinctHeads`). Of
    the ways, the one that moves the fewest bytes is taken (`cost/kernels.py`), which may be the repetition.
    """
    graph = edit.copy_graph(program.graph)
    bodies, saved, count = dict[Any, tuple[fx.Graph | None, int]](), 0, 0
    with no_new_guards(graph):
        for node in edit.calls(graph):
            if (found := _find_grouped(replace(program, graph=graph), node)) is None:
                continue
            if (alike := found.alike) not in bodies:
                bodies[alike] = found.choose(device_type)
            body, less = bodies[alike]
            if body is not None:
                found.region(found.bodies[0]).put(body)
                saved, count = saved + less, count + 1
        remove_unused(graph)
    if not count:
        return program
    calls = f"{count} calls that attend" if count > 1 else "the call that attends"
    note = Note(
        "attention", f"{calls} to repeated heads of keys or values: not repeated, {format_bytes(saved)} less to move"
    )
    return replace(program, graph=graph, notes=(*program.notes, note))


@dataclass(frozen=True)
class _Grouped:
    """An attention, or a product of one that is written out, and ways to compute it without repeated heads.

    Attributes:
        parts: keys and values with distinct heads.
        others: queries, and a mask.
        bodies: torch code on all of these.
    """

    node: fx.Node
    parts: tuple[_DistinctHeads, ...]
    others: tuple[fx.Node, ...]
    bodies: tuple[Callable[..., Tensor], ...]

    @cached_property
    def inputs(self) -> list[fx.Node]:
        return list(dict.fromkeys((*(value for part in self.parts for value in part.inputs), *self.others)))

    @cached_property
    def calls(self) -> list[fx.Node]:
        """The calls that repeat heads, and the one that reads them, in order."""
        return [*dict.fromkeys(node for part in self.parts for node in part.calls), self.node]

    @property
    def alike(self) -> Any:
        """A description that is equal for calls that may have one body."""
        place = {node: at for at, node in enumerate((*self.inputs, *self.calls))}
        wired = [edit.map_operands(node, lambda _, operand: ("operand", place.get(operand))) for node in self.calls]
        kinds = [(node.target, *call, node) for node, call in zip(self.calls, wired, strict=True)]
        return key((kinds, self.inputs, [place[part.value] for part in self.parts]))

    def region(self, body: Callable[..., Tensor]) -> Region:
        def run(*given: Tensor) -> Tensor:
            values = dict(zip(self.inputs, given, strict=True))
            return body(*(part.compute(values) for part in self.parts), *(values[other] for other in self.others))

        return Region(self.node, self.inputs, run, WHOLE)

    def choose(self, device_type: str) -> tuple[fx.Graph | None, int]:
        """Return the body that moves the fewest bytes, if they are fewer than now, and how many fewer."""
        now, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for value in self.inputs:
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


def _find_grouped(program: PlannedProgram, node: fx.Node) -> _Grouped | None:
    """Return the ways to read a call's repeated operands, in the largest groups."""
    if node.target in PRODUCTS:
        q, *repeated = edit.operands(node)
        others, bodies = (q,), (_multiply_rows,)
    elif node.target is ATTENTION and IN_TURNS not in node.meta:
        args = edit.bound(node)
        q, *repeated = (args[name] for name in ("query", "key", "value"))
        call = _Attention(args["is_causal"], args["scale"], memory_order(edit.fake(node)))
        others = (q,) if args["attn_mask"] is None else (q, args["attn_mask"])
        bodies = (call.attend_in_groups,) if call.is_causal else (call.attend_in_groups, call.attend_in_rows)
        if args["dropout_p"]:
            return None
    else:
        return None
    if edit.ndim(q) < 3 or any(edit.ndim(each) != edit.ndim(q) for each in repeated):
        return None
    heads, *others_heads = (edit.shape(each)[HEADS] for each in (q, *repeated))
    if not all(isinstance(each, int) for each in (heads, *others_heads)):
        return None
    is_grouped = node.target is ATTENTION and args["enable_gqa"] and len({heads, *others_heads}) == 2
    if not is_grouped and {heads} != {*others_heads}:
        return None
    for times in [1] if is_grouped else [each for each in range(heads, 1, -1) if heads % each == 0]:
        found = [part for value in repeated if (part := _DistinctHeads.find(program, value, times)) is not None]
        if len(found) == len(repeated):
            return (
                _Grouped(node, tuple(found), others, bodies) if all(part.is_used_for(node) for part in found) else None
            )
    return None


@dataclass(frozen=True)
class _Attention:
    """A call on the distinct heads of keys and values; `order`: of the result's dims in memory."""

    is_causal: bool
    scale: float | None
    order: list[int]

    def attend_in_groups(self, k: Tensor, v: Tensor, q: Tensor, mask: Tensor | None = None) -> Tensor:
        return ATTENTION(q, k, v, mask, is_causal=self.is_causal, scale=self.scale, enable_gqa=True)

    def attend_in_rows(self, k: Tensor, v: Tensor, q: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend with rows [steps * group]: a cut of the steps stays a cut into runs of rows."""
        count = k.shape[HEADS]
        by_head = aten.unflatten.int(q, HEADS, [count, -1])  # [..., heads, group, steps, features]
        times = by_head.shape[HEADS]
        rows = aten.flatten.using_ints(by_head.transpose(HEADS, STEPS), HEADS, STEPS)
        seen = None if mask is None else _rows_of_mask(mask, count, times)
        made = aten.unflatten.int(ATTENTION(rows, k, v, seen, scale=self.scale), STEPS, [-1, times])
        if self.order.index(len(self.order) + STEPS) < self.order.index(len(self.order) + HEADS):
            by_step = made.movedim(HEADS, HEADS - 1)  # [..., steps, heads, group, features]
            return aten.flatten.using_ints(by_step, HEADS, STEPS).transpose(HEADS, STEPS)
        return aten.flatten.using_ints(made.transpose(HEADS, STEPS), HEADS - 1, HEADS)


def _rows_of_mask(mask: Tensor, count: int, times: int) -> Tensor:
    """Return the mask of rows [steps * group], from one of [..., heads or 1, steps or 1, keys]."""
    has_heads = mask.ndim > 2 and not statically_equal(mask.shape[HEADS], 1)
    has_steps = not statically_equal(mask.shape[STEPS], 1)
    if not has_heads and not has_steps:
        return mask
    steps_at = mask.ndim + STEPS
    if has_heads:
        by_head = aten.unflatten.int(mask, HEADS, [count, times]).transpose(HEADS, STEPS)
    else:
        by_head = mask.unsqueeze(-2).expand(*(-1 for _ in range(steps_at + 1)), times, -1)
    return aten.flatten.using_ints(by_head, -3, -2)


def _multiply_rows(few: Tensor, q: Tensor) -> Tensor:
    """Multiply rows [group * steps], which are a view of both the operand and the result if these are dense."""
    rows = aten.flatten.using_ints(aten.unflatten.int(q, HEADS, [few.shape[HEADS], -1]), HEADS, STEPS)
    times = q.shape[HEADS] // few.shape[HEADS]
    return aten.flatten.using_ints(aten.unflatten.int(rows @ few, STEPS, [times, -1]), HEADS - 1, HEADS)


@dataclass
class _DistinctHeads:
    """A value with each group of equal heads once, as torch code on other values.

    A value whose heads are equal in groups would be the same on all ranks of an axis that cuts each group. So the
    rules of its ops say which shares of their operands they need, down to an op that repeats.

    Attributes:
        inputs: the values from outside.
        steps: the calls of which a share is computed, with its sharding: what from, and how.
    """

    program: PlannedProgram
    value: fx.Node
    mesh: Mesh
    sharding: Sharding
    inputs: list[fx.Node] = field(default_factory=list)
    steps: dict[tuple[fx.Node, Sharding], _Step] = field(default_factory=dict)

    @classmethod
    def find(cls, program: PlannedProgram, value: fx.Node, times: int) -> _DistinctHeads | None:
        """Return a value without its groups of so many equal heads; None if it is not known to have such."""
        heads, at = edit.shape(value)[HEADS], edit.ndim(value) + HEADS
        whole, mesh = Sharding.replicated(edit.ndim(value)), Mesh(((GROUP, times),))
        if times == 1:
            return cls(program, value, mesh, whole, [value])
        cut = DimSharding.by(GROUP, block=times if times < heads else 0)
        found = cls(program, value, mesh, whole.with_dim(at, cut))
        return found if found._add(value, found.sharding) else None

    @property
    def calls(self) -> list[fx.Node]:
        return [node for node, _ in self.steps]

    def is_used_for(self, reader: fx.Node) -> bool:
        """Return True if nothing but this and other calls that could do without uses the repeated heads."""
        users = {user for node in self.calls for user in node.users} - {*self.calls}
        return all(user is reader or user.target in (ATTENTION, *PRODUCTS) for user in users)

    def compute(self, values: Mapping[fx.Node, Tensor]) -> Tensor:
        made = {(node, Sharding.replicated(edit.ndim(node))): values[node] for node in self.inputs}
        for place, step in self.steps.items():
            made[place] = step.run(*(made[operand] for operand in step.operands))
        return made[self.value, self.sharding]

    def _add(self, node: fx.Node, sharding: Sharding) -> bool:
        """Add the share of a value, after those that it is computed from. Return False if one cannot be computed."""
        if (node, sharding) in self.steps:
            return True
        if not sharding.axes:
            self.inputs += [] if node in self.inputs else [node]
            return True
        if node.op != "call_function" or not isinstance(node.target, OpOverload) or not edit.is_tensor(node):
            return False
        step = self._undo_repeat(node, sharding) or self._follow_rule(node, sharding)
        if step is None or node in self.calls or not all(self._add(*operand) for operand in step.operands):
            return False
        self.steps[node, sharding] = step
        return True

    def _undo_repeat(self, node: fx.Node, sharding: Sharding) -> _Step | None:
        """Return the share of a copy, or of an op that makes a group of equal heads."""
        operands, args = edit.operands(node), edit.bound(node)
        first, times = operands[0] if operands else node, self.mesh.degree(GROUP)
        whole, dim = Sharding.replicated(edit.ndim(first)), next(d for d, own in enumerate(sharding.dims) if own.axes)
        if node.target in COPIES:
            return _Step([(first, sharding)], lambda value: value)
        if node.target is aten.expand.default:
            return self._undo_expand(node, first, sharding, dim)
        if sharding.dims[dim].levels[0].unit != 1:
            return None
        if (chosen := self._chosen(node, dim)) is not None:
            return _Step([(first, whole)], lambda value: value) if chosen == _in_groups(first, dim, times) else None
        if edit.shape(node)[dim] != times:
            return None
        if node.target in (aten.cat.default, aten.stack.default):
            if args["dim"] % edit.ndim(node) != dim or operands.count(first) != times:
                return None
            is_new = node.target is aten.stack.default
            return _Step([(first, whole)], lambda value: value.unsqueeze(dim) if is_new else value)
        if node.target is aten.repeat.default:
            if any(each != (times if d == dim else 1) for d, each in enumerate(args["repeats"])):
                return None
            return _Step([(first, whole)], lambda value: value[(None,) * (edit.ndim(node) - value.ndim)])
        return None

    def _undo_expand(self, node: fx.Node, source: fx.Node, sharding: Sharding, dim: int) -> _Step | None:
        """Return a smaller expansion of a dim of size 1, or of another dim of a share."""
        shape = sharding.local_shape(edit.shape(node), self.mesh, self.mesh.coordinate(0))
        sizes = [-1 if isinstance(size, torch.SymInt) else size for size in shape]
        new = edit.ndim(node) - edit.ndim(source)
        is_grown = dim < new or statically_equal(edit.shape(source)[dim - new], 1)
        have = [DimSharding() if is_grown else own for own in sharding.dims[new:]]
        if any(
            size == -1 and (d < new or not statically_equal(edit.shape(source)[d - new], shape[d]))
            for d, size in enumerate(sizes)
        ):
            return None
        return _Step([(source, replace(sharding, dims=tuple(have)))], lambda value: value if value.shape == shape else value.expand(sizes))

    def _chosen(self, node: fx.Node, dim: int) -> list[int] | None:
        """Return the constant positions that a look-up along a dim chooses."""
        args = edit.bound(node)
        if node.target is aten.index_select.default and args["dim"] % edit.ndim(node) == dim:
            return _constant(self.program, args["index"])
        if node.target is aten.index.Tensor:
            chosen = [(at, index) for at, index in enumerate(args["indices"]) if index is not None]
            if len(chosen) == 1 and chosen[0][0] == dim and edit.ndim(chosen[0][1]) == 1:
                return _constant(self.program, chosen[0][1])
        return None

    def _follow_rule(self, node: fx.Node, sharding: Sharding) -> _Step | None:
        """Return the share of an op's result, from the shares of its operands that its rule asks for."""
        rule = rule_of(node)
        if rule is None or len(rule.pattern.outputs) != 1:
            return None
        option = follow(rule, rule.pattern.outputs[0], sharding, self.mesh)
        both = option if isinstance(option, Refusal) else shardings(rule, option, self.mesh)
        if isinstance(option, Refusal) or isinstance(both, Refusal) or both[1][0] != sharding:
            return None
        if any(factor in own for factor in option.cuts for own in (rule.local, rule.positions, rule.windows)):
            return None
        here, operands = self.mesh.coordinate(0), edit.operands(node)
        places = list(zip(operands, both[0], strict=True))
        shape = sharding.local_shape(edit.shape(node), self.mesh, here)
        if not any(given.axes for given in both[0]):
            return None  # the shares that are made of whole operands may differ
        if node.target in RESHAPES:
            run = _reshape(both[0][0].local_shape(edit.shape(operands[0]), self.mesh, here), shape)
            return None if run is None else _Step(places, run)
        if rule.sizes or rule.counts or not all(map(edit.is_tensor, node.all_input_nodes)):
            return None

        def call(*values: Tensor) -> Any:
            args, kwargs = edit.map_operands(node, lambda at, _: values[at])
            return node.target(*args, **kwargs)  # type: ignore[operator]

        return _Step(places, call)


class _Step(NamedTuple):
    """Values in the shardings that are needed, and what to do with their shares."""

    operands: list[tuple[fx.Node, Sharding]]
    run: Callable[..., Any]


def _in_groups(source: fx.Node, dim: int, times: int) -> list[int]:
    return [head for head in range(edit.shape(source)[dim]) for _ in range(times)]


def _constant(program: PlannedProgram, index: fx.Node) -> list[int] | None:
    """Return the values of a vector that depends on constants alone."""
    constants = {node: program.state(name) for node, name in program.leaves() if name in program.source.constants}
    behind = [index, *edit.nodes_behind(index)]
    if any(node.op != "call_function" and node not in constants for node in behind):
        return None
    values = dict[fx.Node, Any](constants)
    for node in index.graph.nodes:
        if node in behind and node not in values:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    made: list[int] = values[index].tolist()
    return made


def _reshape(have: Sequence[Any], want: Sequence[Any]) -> Callable[[Tensor], Tensor] | None:
    """Return code for a change of shape; with several dynamic sizes only for one that merges neighbours."""
    if sum(isinstance(size, torch.SymInt) for size in want) < 2:
        sizes = [-1 if isinstance(size, torch.SymInt) else size for size in want]
        return lambda value: value.reshape(sizes)
    runs, start = list[tuple[int, int]](), 0
    for size in want:
        stop, product = start + 1, have[start] if start < len(have) else None
        while product is not None and not statically_equal(product, size):
            product = product * have[stop] if stop < len(have) else None
            stop += 1
        if product is None:
            return None
        runs.append((start, stop - 1))
        start = stop

    def merge(value: Tensor) -> Tensor:
        for first, last in reversed(runs):
            value = aten.flatten.using_ints(value, first, last) if last > first else value
        return value

    return merge if start == len(have) else None


def _bytes_moved(graph: fx.Graph, device_type: str) -> float:
    """Return the bytes that pass through memory, by the model of kernels, and in reshapes that copy."""
    total, mesh = 0.0, Mesh(((GROUP, 1),))

    def count(value: Tensor) -> int:
        return stored_bytes(value, Sharding.replicated(value.ndim), mesh)

    for node, kernel in find_kernels(graph).items():
        values = [*(edit.fake(operand) for operand in edit.operands(node)), *edit.outputs(node)]
        total += sum(share * count(each) for share, each in zip(kernel.moves, values, strict=bool(kernel.moves)))
        if node.target is ATTENTION:
            total += (reads_of_groups(node, device_type) - 1) * sum(map(count, values[1:3]))
    for node in edit.calls(graph):
        if node.target in RESHAPES and not _is_view(edit.fake(edit.operands(node)[0]), edit.fake(node)):
            total += 2 * count(edit.fake(node))
    return total


def _is_view(value: Tensor, made: Tensor) -> bool:
    """Return True if a change of shape needs no copy."""
    try:
        value.view(made.shape)
    except (RuntimeError, ValueError):
        return False
    return True
