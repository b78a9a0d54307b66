"""The sizes to run pieces of a program at: numbers for dynamic ones, and small ones where that proves as much."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from tpcompiler.errors import RuleError
from tpcompiler.ir import edit
from tpcompiler.rules.registry import rule_of
from tpcompiler.soundness.folded import Folded, Region

aten = torch.ops.aten
SMALL = 16
# Their numbers are compared with values, and no sizes.
OF_VALUES = (
    aten.sub.Tensor,
    aten.lt.Scalar,
    aten.ge.Scalar,
    aten.scalar_tensor.default,
    aten.masked_fill.Scalar,
)


def plain(value: Any, program: ExportedProgram) -> Any:
    """A size (or number, or truth) with a number in place of every symbol: its least, but 2 or 3 where that is less."""
    if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value
    expr = value.node.expr
    ranges = program.range_constraints
    chosen = {}
    for symbol in sorted(expr.free_symbols, key=str):
        known = ranges.get(symbol)
        least = int(known.lower) if known is not None else 0
        size = max(least, 2 + sum(map(ord, str(symbol))) % 2)
        chosen[symbol] = min(size, int(known.upper)) if known is not None and known.upper.is_Integer else size
    result = expr.xreplace(chosen)
    kinds: list[tuple[type, type]] = [(torch.SymInt, int), (torch.SymFloat, float), (torch.SymBool, bool)]
    return next(kind for symbolic, kind in kinds if isinstance(value, symbolic))(result)


def plain_shape(shape: Sequence[Any], program: ExportedProgram) -> list[int]:
    return [plain(size, program) for size in shape]


def whole_shape(made: Folded, whole: fx.Node) -> list[int]:
    return plain_shape(edit.outputs(whole)[0].shape, made.program)


def operand_shapes(made: Folded, region: Region) -> dict[str, list[int]]:
    """The shapes of what a body's call takes, by name, small in the dims that neither cuts nor numbers speak of.

    Calls without a number that is a size do the same whatever the size is. So the width of a large vocabulary's
    embedding can be small, and nobody needs memory for it.
    """
    operands = edit.operands(region.call)
    shapes = {node.name: whole_shape(made, node) for node in operands}
    try:
        rule = rule_of(region.call)
    except RuleError:
        rule = None
    if rule is None or _has_sizes(region.call) or any(map(_has_sizes, region.nodes)):
        return shapes
    terms = {node.name: term for node, term in zip(operands, rule.pattern.inputs, strict=True)}
    ends = [(made.shardings[n][0], terms[made.whole[n].name]) for n in region.inputs if edit.is_tensor(n)]
    for node in region.outputs:
        part = made.whole[node]
        index: Any = 0 if part is region.call else part.args[1]
        ends.append((made.shardings[node][0], rule.pattern.outputs[index]))
    kept = {f for sharding, term in ends for by, dim in zip(sharding.dims, term, strict=True) if by.axes for f in dim}
    kept |= {f for term in (*terms.values(), *rule.pattern.outputs) for dim in term if len(dim) > 1 for f in dim}
    kept |= set(rule.pattern.whole)
    for name, term in terms.items():
        for at, dim in enumerate(term):
            if dim and not kept.intersection(dim):
                shapes[name][at] = min(shapes[name][at], SMALL)
    return shapes


def _has_sizes(node: fx.Node) -> bool:
    """Whether some number may be a size: one that is not small, or is not known yet."""
    found: list[Any] = []
    fx.node.map_aggregate((node.args, dict(node.kwargs)), found.append)
    return any(
        (
            isinstance(value, int)
            and not isinstance(value, bool)
            and abs(value) >= SMALL
            and node.target not in OF_VALUES
        )
        or (isinstance(value, fx.Node) and not edit.outputs(value))
        for value in found
    )
