"""Values whose heads are equal in groups, with each group once."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from tpcompiler._torch import OpOverload, aten
from tpcompiler.ir import edit
from tpcompiler.ir.dim_sharding import DimSharding
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.region import Region
from tpcompiler.ir.sharding import Sharding
from tpcompiler.ir.sizes import statically_equal
from tpcompiler.rules.infer import Refusal, follow, shardings
from tpcompiler.rules.registry import rule_of

HEADS = -3  # the dim of heads: [..., heads, steps, features]
GROUP = "group"  # an axis whose ranks would hold the equal heads of a group
COPIES = (aten.clone.default, aten.alias.default, aten.lift_fresh_copy.default)
RESHAPES = (*edit.VIEWS, aten.flatten.using_ints, aten.unflatten.int)


def find_distinct_heads(
    values: Sequence[fx.Node], heads: Any, constants: Mapping[fx.Node, Tensor]
) -> list[DistinctHeads] | None:
    """Return values of so many heads with each group of equal heads once, in the largest groups that all have.

    None if they are not known to repeat heads. `constants`: the values of placeholders, which may be positions.
    """
    is_repeated = isinstance(heads, int) and all(edit.shape(value)[HEADS] == heads for value in values)
    for times in range(heads, 1, -1) if is_repeated else ():
        if heads % times == 0:
            found = [part for value in values if (part := DistinctHeads.find(value, times, constants)) is not None]
            if len(found) == len(values):
                return found
    return None


def region_on(
    node: fx.Node,
    parts: Sequence[DistinctHeads],
    others: Sequence[fx.Node],
    body: Callable[..., Tensor],
    whole: tuple[OpOverload, ...],
    asked_by: str = "",
) -> Region:
    """Return the region of a call whose body takes values with distinct heads, and then others."""
    inputs = list(dict.fromkeys((*(value for part in parts for value in part.inputs), *others)))

    def run(*given: Tensor) -> Tensor:
        values = dict(zip(inputs, given, strict=True))
        return body(*(part.compute(values) for part in parts), *(values[other] for other in others))

    return Region(node, inputs, run, whole, asked_by)


@dataclass
class DistinctHeads:
    """A value with each group of equal heads once, as torch code on other values.

    A value whose heads are equal in groups would be the same on all ranks of an axis that cuts each group. So the
    rules of its ops say which shares of their operands they need, down to an op that repeats.

    Attributes:
        inputs: the values from outside.
        steps: the calls of which a share is computed, with its sharding: what from, and how.
    """

    value: fx.Node
    mesh: Mesh
    sharding: Sharding
    constants: Mapping[fx.Node, Tensor]
    inputs: list[fx.Node] = field(default_factory=list)
    steps: dict[tuple[fx.Node, Sharding], _Step] = field(default_factory=dict)

    @classmethod
    def of(cls, value: fx.Node) -> DistinctHeads:
        """Return a value whose heads are distinct already."""
        return cls(value, Mesh(((GROUP, 1),)), Sharding.replicated(edit.ndim(value)), {}, [value])

    @classmethod
    def find(cls, value: fx.Node, times: int, constants: Mapping[fx.Node, Tensor]) -> DistinctHeads | None:
        """Return a value without its groups of so many equal heads; None if it is not known to have such."""
        heads, at = edit.shape(value)[HEADS], edit.ndim(value) + HEADS
        cut = DimSharding.by(GROUP, block=times if times < heads else 0)
        sharding = Sharding.replicated(edit.ndim(value)).with_dim(at, cut)
        found = cls(value, Mesh(((GROUP, times),)), sharding, constants)
        return found if found._add(value, sharding) else None

    @property
    def calls(self) -> list[fx.Node]:
        return [node for node, _ in self.steps]

    def is_used_by(self, reader: fx.Node, others: Container[Any]) -> bool:
        """Return True if only a reader, and calls of such ops, use more than the sizes of the repeated heads."""
        uses = [(node, user) for node in self.calls for user in node.users if user not in self.calls]
        return all(
            user is reader or user.target in others or (node.target.is_view and not edit.outputs(user))  # type: ignore
            for node, user in uses
        )

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
        given = replace(sharding, dims=tuple(have))
        before = given.local_shape(edit.shape(source), self.mesh, self.mesh.coordinate(0))
        is_same = not new and all(map(statically_equal, before, shape))
        return _Step([(source, given)], lambda value: value if is_same else value.expand(sizes))

    def _chosen(self, node: fx.Node, dim: int) -> list[int] | None:
        """Return the constant positions that a look-up along a dim chooses."""
        args = edit.bound(node)
        if node.target is aten.index_select.default and args["dim"] % edit.ndim(node) == dim:
            return _constant(self.constants, args["index"])
        if node.target is aten.index.Tensor:
            chosen = [(at, index) for at, index in enumerate(args["indices"]) if index is not None]
            if len(chosen) == 1 and chosen[0][0] == dim and edit.ndim(chosen[0][1]) == 1:
                return _constant(self.constants, chosen[0][1])
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
        counted = {factor for sized in (*rule.sizes.values(), *rule.counts.values()) for dim in sized for factor in dim}
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
        if not counted.isdisjoint(option.cuts) or not all(map(edit.is_tensor, node.all_input_nodes)):
            return None  # the op counts equal heads, or has a dynamic size

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


def _constant(constants: Mapping[fx.Node, Tensor], index: fx.Node) -> list[int] | None:
    """Return the values of a vector that depends on constants alone."""
    behind = [index, *edit.nodes_behind(index)]
    if any(node.op != "call_function" and node not in constants for node in behind):
        return None
    values = dict[fx.Node, Any](constants)
    for node in index.graph.nodes:
        if node in behind and node not in values:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)
    made: list[int] = values[index].tolist()
    return made


def _reshape(have: Sequence[Any], want: Sequence[Any]) -> Callable[[Tensor], Tensor] | None:
    """Return code for a change of shape, of which one dynamic size may be none of the sizes before."""
    kept = [
        next((at for at, size in enumerate(have) if statically_equal(size, new)), -1)
        if isinstance(new, torch.SymInt)
        else None
        for new in want
    ]

    def run(value: Tensor) -> Tensor:
        pairs = zip(kept, want, strict=True)
        return value.reshape([new if at is None else -1 if at < 0 else value.shape[at] for at, new in pairs])

    return run if kept.count(-1) < 2 else None
