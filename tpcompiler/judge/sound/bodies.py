"""Check that the body that a rank runs for its share of an op is the body of the op's rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from tpcompiler._torch import OpOverload, enable_python_dispatcher, trace_ops
from tpcompiler.ir import edit
from tpcompiler.ir.local import key
from tpcompiler.ir.sharding import Sharding
from tpcompiler.judge.sound.folded import Folded
from tpcompiler.judge.sound.numbering import Numbering
from tpcompiler.judge.sound.ops import find_option
from tpcompiler.judge.sound.region import ProgramRegion
from tpcompiler.judge.sound.shares import runs_of
from tpcompiler.judge.sound.unsound import Unsound
from tpcompiler.rules.index_range import ASSERT, PositionCheck, is_needed, position_checks, with_checks
from tpcompiler.rules.notation import ShardRange
from tpcompiler.rules.registry import rule_of


def check_body(made: Folded, region: ProgramRegion, rank: int, row: Sequence[int]) -> None:
    """Check that a region is its op's share by the op's rule, as `check_ops` does for a call.

    The shardings of operands and results must be an option of the rule. The rule's body is traced for the rank's share,
    and compared with the region op by op, argument by argument; the region must read the body's offset from its row of
    numbers. So a body is right for all values and sizes, as the rule's is by brute force. An assertion that positions
    are in the whole dim may precede it, and must if nothing else rejects other positions.

    Raises:
        Unsound: the region is something else.
    """
    call, last = region.call, region.nodes[-1]
    operands = made.named.get(region.outputs[0], [])  # each value as the claimed call takes it
    for node in region.inputs:
        if edit.is_tensor(node) and node not in operands:
            raise Unsound(last, f"is the end of {region.name}, which uses '{node.name}' outside its call")
    # A size is the whole's; one value may be two operands, which ranks have other shares of.
    arguments, held = edit.map_operands(call, lambda at, _: operands[at]), list[fx.Node]()
    fx.node.map_arg(arguments, held.append)
    parts: list[Any] = [None if made.whole[node] is call else made.whole[node].args[1] for node in region.outputs]
    gives: list[Sharding | None] = [None for _ in edit.outputs(call)]
    for node, part in zip(region.outputs, parts, strict=True):
        gives[part or 0] = made.shardings[node][0]
    wants = tuple(made.shardings[node][0] for node in operands)
    rule, option = find_option(made, last, call, wants, gives)
    cuts = {factor: cut for factor, cut in option.cuts.items() if factor in rule.local}
    if not cuts:
        raise Unsound(last, f"is the end of {region.name}, and {call.target} is run as it is on such shares")
    (body,) = {rule.local[factor] for factor in cuts}
    checks = position_checks(call, rule, cuts)
    shares, here = [(cut, rule.extent[factor]) for factor, cut in cuts.items()], made.mesh.coordinate(rank)
    shard = rule.range_of(option.cuts, made.mesh, here)
    runs = runs_of(*shares[0], made.mesh, here) if isinstance(shares[0][1], int) else []
    if runs and (runs[0].start, len(runs[0])) != (shard.offset, shard.size):
        raise Unsound(last, f"is the end of {region.name} of {shard.size} from {shard.offset} on, and it has {runs}")
    known = (
        "body",
        id(made.mode),
        call.target,
        key(fx.node.map_arg(arguments, edit.fake)),
        key(list(vars(shard).values())),
        checks,
        *cuts,
        *parts,
    )
    if known not in made.results:
        made.results[known] = _traced(made, arguments, held, with_checks(body, checks), shard, parts)
    traced: fx.Graph = made.results[known]
    table = Numbering(sizes_by_value=True)
    offset, *inputs = (node for node in traced.nodes if node.op == "placeholder")
    wanted = {node: table.number("input", own.name) for node, own in zip(inputs, held, strict=True)}
    wanted[offset] = table.number("number", key(shard.offset))
    numbers: dict[Any, int] = {node: table.number("input", node.name) for node in held}
    own = zip(region.numbers, made.numbers.of(region.numbers, row), strict=True)
    numbers.update({node: table.number("number", key(number)) for node, number in own})
    ends: Any = traced.output_node().args[0]
    for node, end in zip(region.outputs, ends, strict=True):
        if table.of(node, numbers) != table.of(end, wanted):
            raise Unsound(
                node, f"is the end of {region.name}, which is not what the rule of {call.target} does on a share"
            )
    may = [table.of(node.args[0], wanted) for node in traced.nodes if node.target is ASSERT]
    done = {table.of(node.args[0], numbers) for node in region.nodes if node.target is ASSERT}  # type: ignore[arg-type]
    needed = needed_checks(made, call)
    for check, number in zip(checks, may, strict=True):
        if check in needed and number not in done:
            raise Unsound(
                region.outputs[0],
                f"is the end of {region.name}, which must assert that positions are in [{check.least}, {check.most}]",
            )
    for node in region.nodes:  # an unused op may still draw random numbers or stop the rank
        is_check = node.target is ASSERT and numbers[node.args[0]] in may
        if node not in numbers and isinstance(node.target, OpOverload) and not _is_size(node) and not is_check:
            raise Unsound(node, f"is in {region.name}, and nothing that this makes depends on it")


def needed_checks(made: Folded, call: fx.Node) -> list[PositionCheck]:
    """Return the position checks that ranks must make for a call, for any cut of the dims that the positions index."""
    rule = rule_of(call)
    if rule is None or made.at_door is None:
        return []
    return [check for check in position_checks(call, rule, rule.local) if is_needed(check, call, made.at_door)]


def _is_size(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (int, torch.SymInt))


def _traced(
    made: Folded, arguments: Any, held: Sequence[fx.Node], body: Any, shard: ShardRange, parts: Sequence[int | None]
) -> fx.Graph:
    def run(offset: torch.Tensor, *values: Any) -> list[Any]:
        left = iter(values)
        args, kwargs = fx.node.map_arg(arguments, lambda _: next(left))
        result = body(*args, shard=replace(shard, offset=offset), **kwargs)
        return [result if part is None else result[part] for part in parts]

    with made.mode, torch.no_grad(), enable_python_dispatcher():
        values = [torch.empty_like(edit.fake(n)) if edit.is_tensor(n) else edit.fake(n) for n in held]
        return trace_ops(run, torch.empty((), dtype=torch.int64), *values)
