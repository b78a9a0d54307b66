"""Check that the body that a rank runs for its share of an op is the body of the op's rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from tpcompiler._torch import OpOverload, enable_python_dispatcher, trace_ops
from tpcompiler.ir import edit
from tpcompiler.ir.dim_sharding import DimSharding
from tpcompiler.ir.local import key
from tpcompiler.judge.sound.folded import Folded
from tpcompiler.judge.sound.numbering import Numbering
from tpcompiler.judge.sound.region import ProgramRegion
from tpcompiler.judge.sound.unsound import Unsound
from tpcompiler.rules.index_range import ASSERT, PositionCheck, is_needed, position_checks, with_checks
from tpcompiler.rules.infer import Refusal, follow, merge
from tpcompiler.rules.notation import Rule, ShardRange
from tpcompiler.rules.registry import rule_of


def check_body(made: Folded, region: ProgramRegion, rule: Rule, rank: int, row: Sequence[int]) -> None:
    """Trace the rule's body for the rank's share, and compare it with the region op by op, argument by argument.

    The region must read the body's offset from its row of numbers. So a body is right for all values and sizes, as the
    rule's is by brute force, not only for those that were tried. An assertion that positions are in the whole dim may
    precede it, and must if nothing else rejects other positions.

    Raises:
        Unsound: the two differ.
    """
    call: fx.Node = region.call
    # A value exists under every sharding that it is changed to; the region takes one of them.
    nodes = {made.whole[node]: node for node in (*made.whole, *region.inputs) if node not in region.nodes}
    held = {used: nodes[used] for used in call.all_input_nodes}
    cuts = _cuts(made, call, rule, held)
    (body,) = {rule.local[factor] for factor in cuts}
    checks = position_checks(call, rule, cuts)
    shard = ShardRange.of([(cut, rule.extent[f]) for f, cut in cuts.items()], made.mesh, made.mesh.coordinate(rank))
    parts: list[Any] = [None if made.whole[node] is call else made.whole[node].args[1] for node in region.outputs]
    known = (
        "body",
        id(made.mode),
        call.target,
        key(_given(call, held)),
        key(list(vars(shard).values())),
        checks,
        *cuts,
        *parts,
    )
    if known not in made.results:
        made.results[known] = _traced(made, call, held, with_checks(body, checks), shard, parts)
    traced: fx.Graph = made.results[known]
    table = Numbering(sizes_by_value=True)
    offset, *inputs = (node for node in traced.nodes if node.op == "placeholder")
    wanted = {node: table.number("input", used.name) for node, used in zip(inputs, held, strict=True)}
    wanted[offset] = table.number("number", key(shard.offset))
    numbers = {node: table.number("input", used.name) for used, node in held.items()}
    numbers.update({node: table.number("number", key(row[made.numbers.read[node]])) for node in region.numbers})
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
        is_check = node.target is ASSERT and numbers[node.args[0]] in may  # type: ignore[index]
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


def _given(call: fx.Node, held: Mapping[fx.Node, fx.Node]) -> Any:
    return fx.node.map_arg([call.args, dict(call.kwargs)], lambda used: edit.fake(held[used]))


def _cuts(made: Folded, call: fx.Node, rule: Rule, held: Mapping[fx.Node, fx.Node]) -> dict[str, DimSharding]:
    """Return the factors that need a body, with their cuts."""
    candidates = []
    for term, operand in zip(rule.pattern.inputs, edit.operands(call), strict=True):
        followed = follow(rule, term, made.shardings[held[operand]][0].settled(), made.mesh)
        if not isinstance(followed, Refusal):
            candidates.append(followed)
    option = merge(candidates)
    cuts = {} if option is None else {f: cut for f, cut in option.cuts.items() if f in rule.local}
    if not cuts:
        raise Unsound(
            held[call.all_input_nodes[0]], f"is given to a body of {call.target}, and not cut where that needs one"
        )
    return cuts


def _traced(
    made: Folded,
    call: fx.Node,
    held: Mapping[fx.Node, fx.Node],
    body: Any,
    shard: ShardRange,
    parts: Sequence[int | None],
) -> fx.Graph:
    def run(offset: torch.Tensor, *values: Any) -> list[Any]:
        given = dict(zip(held, values, strict=True))
        args, kwargs = fx.node.map_arg((call.args, dict(call.kwargs)), lambda used: given[used])
        result = body(*args, shard=replace(shard, offset=offset), **kwargs)
        return [result if part is None else result[part] for part in parts]

    with made.mode, torch.no_grad(), enable_python_dispatcher():
        values = [torch.empty_like(edit.fake(n)) if edit.is_tensor(n) else edit.fake(n) for n in held.values()]
        return trace_ops(run, torch.empty((), dtype=torch.int64), *values)
