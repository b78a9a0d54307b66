"""Positions and their valid range, outside which the single-device program raises.

A rank that holds a part of an indexed dim masks the positions of other ranks. The op itself then sees no position
beyond the whole dim, so another check must refuse it: `load`, for an input that holds nothing but positions, or an
assertion in the rank's program. The host does not wait for the assertion; on a GPU the kernel raises, as torch's own
kernels do.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from tpcompiler._torch import OpOverload, aten, tree_flatten
from tpcompiler.ir import edit
from tpcompiler.ir.program import Program, pin, reshard
from tpcompiler.ir.sharding import Sharding
from tpcompiler.ir.text import op_name
from tpcompiler.rules.notation import Rule, ShardRange
from tpcompiler.rules.registry import rule_of

ASSERT = aten._assert_async.msg
SAME_VALUES = {  # each of the input's values is one of the result's
    aten.view.default,
    aten.reshape.default,
    aten.flatten.using_ints,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.expand.default,
    aten.permute.default,
    aten.transpose.int,
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten.contiguous.default,
    aten.to.dtype,
    aten.to.dtype_layout,
    aten._to_copy.default,
    pin,
    reshard,
}
CHOSEN = {  # ops that produce positions along a dim of their first operand, and the output that holds them
    aten.topk.default: 1,
    aten.sort.default: 1,
    aten.sort.stable: 1,
    aten.max.dim: 1,
    aten.min.dim: 1,
    aten.argmax.default: 0,
    aten.argmin.default: 0,
    aten.argsort.default: 0,
}
INDICES = (torch.int64, torch.int32)
Range = tuple[int, int]  # the least and the greatest value
Ranges = Mapping[str, Range]  # by input


@dataclass(frozen=True)
class PositionCheck:
    """A rank's assertion on one tensor operand, counted as in `edit.operands`, before it masks positions."""

    operand: int
    least: int
    most: int
    message: str = field(compare=False)


def door_ranges(program: Program, shardings: Mapping[str, Sharding]) -> dict[str, Range]:
    """Return the range of each input that indexes only dims of known sizes, for `load` to check.

    `shardings`: the inputs' shardings. A share of a sum is no index.
    """
    ranges = {}
    for node in program.user_inputs():
        value, sharding = edit.fake(node), shardings.get(node.name)
        if value.dtype in INDICES and not (sharding and sharding.partial) and (ends := list(_ranges(node))):
            ranges[node.name] = max(least for least, _ in ends), min(most for _, most in ends)
    return {name: (least, most) for name, (least, most) in ranges.items() if least <= most}


def _ranges(node: fx.Node) -> Iterator[Range]:
    for user in node.users:
        if user.target in SAME_VALUES:
            if user.args[0] is node and edit.fake(user).dtype in INDICES:  # a narrower dtype wraps
                yield from _ranges(user)
        elif isinstance(user.target, OpOverload) and (rule := rule_of(user)) is not None:
            yield from (ends for _, index, ends in _positions(user, rule, rule.positions) if index is node)


def _positions(node: fx.Node, rule: Rule, factors: Collection[str]) -> Iterator[tuple[int, fx.Node, Range]]:
    """Yield (operand, its node, its range) for positions along these factors, as far as sizes are known."""
    operands = edit.operands(node)
    for factor, (operand, from_end) in rule.positions.items():
        size = rule.extent[factor]
        if factor in factors and isinstance(size, int) and size > 0:
            yield operand, operands[operand], (-size if from_end else 0, size - 1)


def positions_of(node: fx.Node, rule: Rule) -> Iterator[tuple[fx.Node, Range]]:
    """Yield the operands that hold positions, and the ranges that the op accepts, for dims of known sizes."""
    yield from ((index, ends) for _, index, ends in _positions(node, rule, rule.positions))


def position_checks(node: fx.Node, rule: Rule, cut: Collection[str]) -> tuple[PositionCheck, ...]:
    """Return a rank's assertions if the rule's body looks up its own positions along sharded factors."""
    where = ", ".join(filter(None, (edit.module_path(node), edit.source_line(node))))
    at = f" ({where})" if where else ""
    return tuple(
        PositionCheck(
            operand,
            least,
            most,
            f"{op_name(node)}: an index is outside of [{least}, {most}], in a dim of size {most + 1}{at}",
        )
        for operand, _, (least, most) in _positions(node, rule, rule.local.keys() & set(cut))
    )


def is_needed(check: PositionCheck, node: fx.Node, at_door: Ranges) -> bool:
    """Return True unless something else already refuses the positions.

    Another check suffices if the op that makes the positions stays in range, `load` checks the input (`at_door`), or an
    earlier op gets the same positions and accepts no more.
    """
    index, least, most = edit.operands(node)[check.operand], check.least, check.most
    if is_within(index, (least, most), at_door):
        return False
    for user in index.users:
        if user < node and isinstance(user.target, OpOverload) and (rule := rule_of(user)) is not None:
            for _, other, ends in _positions(user, rule, rule.positions):
                if other is index and least <= ends[0] and ends[1] <= most:
                    return False
    return True


def is_within(index: fx.Node, ends: Range, at_door: Ranges) -> bool:
    """Return True if an index is known to stay in a range."""
    index_range = _known_range(index, at_door)
    return index_range is not None and ends[0] <= index_range[0] and index_range[1] <= ends[1]


def _known_range(index: fx.Node, at_door: Ranges) -> Range | None:
    """Return the range of an index if its program determines it or `load` checks it."""
    target: Any = index.target
    if index.op == "placeholder":
        return at_door.get(index.name) if edit.fake(index).dtype in INDICES else None
    if index.op != "call_function" or not edit.is_tensor(index) or edit.fake(index).dtype not in INDICES:
        return None
    if target in SAME_VALUES:
        return _known_range(edit.operands(index)[0], at_door)
    source, output = index.args if target is operator.getitem else (index, 0)
    if CHOSEN.get(getattr(source, "target", None)) == output:
        return _along(source)  # type: ignore[arg-type]
    if not isinstance(target, OpOverload):
        return None
    args: dict[str, Any] = edit.bound(index)
    least, behind = None, None
    if target is aten.remainder.Scalar:
        least, behind = 0, args["other"]
    elif target is aten.clamp.default and type(args["max"]) is int:
        least, behind = args["min"], args["max"] + 1
    elif target is aten.arange.start_step and args.get("step", 1) == 1:
        least, behind = args["start"], args["end"]
    return (least, behind - 1) if type(least) is int and type(behind) is int and least < behind else None


def _along(node: fx.Node) -> Range | None:
    args, shape = edit.arguments(node), edit.shape(edit.operands(node)[0])
    size = shape.numel() if args.dim is None else shape[args.dim] if shape else 1
    return (0, size - 1) if isinstance(size, int) and size > 0 else None


def with_checks(body: Callable[..., Any], checks: Collection[PositionCheck]) -> Callable[..., Any]:
    """Return a local body that first asserts that all positions, of all ranks, are inside the whole dim."""
    if not checks:
        return body

    def checked(*args: Any, shard: ShardRange, **kwargs: Any) -> Any:
        operands = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, torch.Tensor)]
        for check in checks:
            index = operands[check.operand]
            ASSERT(((index >= check.least) & (index <= check.most)).all(), check.message)
        return body(*args, shard=shard, **kwargs)

    return checked
