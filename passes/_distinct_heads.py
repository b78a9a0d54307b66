"""Values whose heads are equal in groups, with each group once."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from tpcompiler._torch import OpOverload, aten
from tpcompiler.ir import edit
from tpcompiler.ir.dim_sharding import DimSharding
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.region import Region
from tpcompiler.ir.sharding import Sharding
from tpcompiler.ir.sizes import are_equal, statically_equal
from tpcompiler.rules.infer import Refusal, follow, shardings
from tpcompiler.rules.registry import rule_of

HEADS = -3  # the dim of heads: [..., heads, steps, features]
GROUP = "group"  # an axis whose ranks would hold the equal heads of a group
_Place = tuple[fx.Node, Sharding]
_Step = tuple[list[_Place], Callable[..., Any]]  # values in the shardings that are needed, and code on their shares
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
    node: fx.Node, parts: Sequence[DistinctHeads], others: Sequence[fx.Node], body: Callable[..., Tensor], **how: Any
) -> Region:
    """Return the region of a call whose body takes values with distinct heads, and then others; `how`: of `Region`."""
    inputs = list(dict.fromkeys((*(value for part in parts for value in part.inputs), *others)))

    def run(*given: Tensor) -> Tensor:
        values = dict(zip(inputs, given, strict=True))
        return body(*(part.compute(values) for part in parts), *(values[other] for other in others))

    return Region(node, inputs, run, **how)


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
    steps: dict[_Place, _Step] = field(default_factory=dict)

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
        for place, (operands, run) in self.steps.items():
            made[place] = run(*(made[operand] for operand in operands))
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
        if step is None or node in self.calls or not all(self._add(*operand) for operand in step[0]):
            return False
        self.steps[node, sharding] = step
        return True

    def _shape(self, node: fx.Node, sharding: Sharding) -> Sequence[Any]:
        return sharding.local_shape(edit.shape(node), self.mesh, self.mesh.coordinate(0))

    def _undo_repeat(self, node: fx.Node, sharding: Sharding) -> _Step | None:
        """Return the share of an op that writes each index of a dim so many times in a row: the op's first operand."""
        dim, times = next(d for d, own in enumerate(sharding.dims) if own.axes), self.mesh.degree(GROUP)
        args, operands, count = edit.bound(node), edit.operands(node), edit.shape(node)[dim]
        indices = dict(enumerate(args["indices"])) if node.target is aten.index.Tensor else {}
        if node.target is aten.index_select.default:
            indices = {args["dim"] % edit.ndim(node): args["index"]}
        if node.target is aten.expand.default:
            at = dim - edit.ndim(node) + edit.ndim(operands[0])
            repeats = at < 0 or statically_equal(edit.shape(operands[0])[at], 1)
        elif sharding.dims[dim].levels[0].unit != 1:
            return None
        elif node.target is aten.repeat.default:
            repeats = count == times and args["repeats"] == [times if d == dim else 1 for d in range(edit.ndim(node))]
        elif node.target in (aten.cat.default, aten.stack.default):
            repeats = args["dim"] % edit.ndim(node) == dim and count == times == operands.count(operands[0])
        else:
            chosen = [(at, self._constant(index)) for at, index in indices.items() if index is not None]
            repeats = bool(chosen) and chosen == [(dim, [at // times for at in range(count)])]
        run = _resize(node.target, edit.shape(operands[0]), self._shape(node, sharding)) if repeats else None
        return run and ([(operands[0], Sharding.replicated(edit.ndim(operands[0])))], run)

    def _constant(self, index: fx.Node) -> Any:
        """Return the numbers of a value that depends on constants alone."""
        behind, values = {*edit.nodes_behind([index])}, dict[fx.Node, Any](self.constants)
        if any(node.op != "call_function" and node not in values for node in behind):
            return None
        for node in (node for node in index.graph.nodes if node in behind and node not in values):
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)
        return values[index].tolist()

    def _follow_rule(self, node: fx.Node, sharding: Sharding) -> _Step | None:
        """Return the share of an op's result, from the shares of its operands that its rule asks for."""
        rule, operands = rule_of(node), edit.operands(node)
        if rule is None or len(rule.pattern.outputs) != 1:
            return None
        option = follow(rule, rule.pattern.outputs[0], sharding, self.mesh)
        both = option if isinstance(option, Refusal) else shardings(rule, option, self.mesh)
        if isinstance(option, Refusal) or isinstance(both, Refusal) or both[1][0] != sharding:
            return None
        if any(factor in own for factor in option.cuts for own in (rule.local, rule.positions, rule.windows)):
            return None
        places = list(zip(operands, both[0], strict=True))
        if not any(given.axes for given in both[0]):
            return None  # the shares that are made of whole operands may differ
        if node.target in COPIES:
            return places, lambda value: value
        if node.target in (*RESHAPES, aten.expand.default):
            run = _resize(node.target, self._shape(*places[0]), self._shape(node, sharding))
            return run and (places, run)
        counted = {factor for sized in (*rule.sizes.values(), *rule.counts.values()) for dim in sized for factor in dim}
        if not counted.isdisjoint(option.cuts) or not all(map(edit.is_tensor, node.all_input_nodes)):
            return None  # the op counts equal heads, or has a dynamic size

        def call(*values: Tensor) -> Any:
            args, kwargs = edit.map_operands(node, lambda at, _: values[at])
            return node.target(*args, **kwargs)  # type: ignore[operator]

        return places, call


def _resize(op: Any, have: Sequence[Any], want: Sequence[Any]) -> Callable[[Tensor], Tensor] | None:
    """Return code for a change of shape, of which one dynamic size may be none of the sizes before."""
    if are_equal(have, want):
        return lambda value: value
    known = [next((at for at, size in enumerate(have) if statically_equal(size, new)), -1) for new in want]
    inferred = [at for at, new in zip(known, want, strict=True) if isinstance(new, torch.SymInt) and at < 0]

    def run(value: Tensor) -> Tensor:
        pairs = zip(known, want, strict=True)
        sizes = [new if isinstance(new, int) else -1 if at < 0 else value.shape[at] for at, new in pairs]
        return value.expand(sizes) if op is aten.expand.default else value.reshape(sizes)

    return run if len(inferred) <= (op is not aten.expand.default) else None
