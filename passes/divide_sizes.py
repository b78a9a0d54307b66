"""Give dynamic dims that are sharded sizes that the mesh divides."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from tpcompiler._torch import (
    FakeTensorMode,
    divided_range,
    divided_sizes,
    substituted,
    sym_multiple,
    symbols_of,
    tree_map,
)
from tpcompiler.errors import UnsupportedError
from tpcompiler.ir import edit
from tpcompiler.ir.control_flow import change_bodies
from tpcompiler.ir.local import fake_mode_of
from tpcompiler.ir.program import IN_TURNS, PIN, Note, PlannedProgram
from tpcompiler.ir.sharding import Sharding
from tpcompiler.ir.sizes import sym_quotient
from tpcompiler.passes.regions.attend_in_turns import STEPS, dealt_out


def divide_sizes(program: PlannedProgram, device_type: str = "cpu") -> PlannedProgram:
    """Make the size of a dynamic dim that an input, an output or a pin shards a multiple of the degree.

        Before    x: f32[s0, 8]                         inputs: x: S(0), by 2 ranks
    After     x: f32[2*s1, 8]                       s1 is what each rank holds; s0 is gone from the program

    All values get new sizes in a separate shape environment: the user's program keeps its own. Sizes that no cut
    constrains keep their symbols. Each new restriction of an input is a note.

    Raises:
        UnsupportedError: a size that is no multiple of one symbol, such as s0 + 1, a size that depends on data, or a
            range without two multiples of the degree.
    """
    parts: dict[Any, int] = {}
    ranges = program.source.range_constraints
    symbols = symbols_of(edit.fake(node) for node in program.user_inputs())  # others depend on data
    for what, value, dim, degree, asked_by in _divided(program, device_type):
        size = value.shape[dim]
        if isinstance(size, int) or sym_quotient(size, degree) is not None:
            continue
        multiple = sym_multiple(size)
        if multiple is None or multiple[0] not in symbols:
            raise UnsupportedError(
                f"cannot shard {what} on dim {dim}: its size {size} is dynamic and need not be a multiple of {degree}",
                help=f"export with that dim static or as {degree} * Dim(...), or leave it whole",
                asked_by=asked_by,
            )
        symbol, count = multiple
        part = parts[symbol] = math.lcm(parts.get(symbol, 1), degree // math.gcd(degree, count))
        least, greatest = divided_range(ranges[symbol], part)
        if least >= greatest:
            bounds, count_in_range = ranges[symbol], "one" if least == greatest else "none"
            raise UnsupportedError(
                f"cannot shard {what} on dim {dim}: its size {size} is dynamic, with {symbol} from {bounds.lower} "
                f"to {bounds.upper}, and {count_in_range} of these is a multiple of {part}",
                help="export with that dim static or with a wider range, or leave it whole",
                asked_by=asked_by,
            )
    if not parts:
        return program
    mode, standing = divided_sizes(fake_mode_of(program.graph), parts, ranges)
    graph = edit.copy_graph(program.graph)
    for node in graph.nodes:
        _substitute(node, mode, standing)
    change_bodies(graph, lambda node: _substitute(node, mode, standing))
    divided_program = replace(program, graph=graph)
    return replace(divided_program, notes=(*program.notes, *_notes(program, divided_program, parts)))


def _substitute(node: fx.Node, mode: FakeTensorMode, standing: Mapping[Any, Any]) -> None:
    if "val" in node.meta:
        node.meta["val"] = tree_map(lambda value: substituted(value, mode, standing), edit.fake(node))


def _notes(before: PlannedProgram, after: PlannedProgram, parts: Mapping[Any, int]) -> Iterator[Note]:
    for old, new in zip(before.user_inputs(), after.user_inputs(), strict=True):
        for dim, (size, divided) in enumerate(zip(edit.shape(old), edit.shape(new), strict=True)):
            if symbols_of([size]) & parts.keys():
                multiple = sym_multiple(size)
                must = f"a multiple of {multiple[1] * parts[multiple[0]]}" if multiple is not None else str(divided)
                yield Note("size", f"dim {dim} of input '{old.name}' must be {must}")


def _divided(program: PlannedProgram, device_type: str) -> Iterator[tuple[str, torch.Tensor, int, int, str]]:
    """Yield (what, value, dim, divisor, asked_by) for every dim that must be divided."""
    for what, value, sharding, asked_by in _placed(program):
        for dim, cut in enumerate(sharding.dims):
            if program.mesh.is_unequal(cut.axes) and not isinstance(value.shape[dim], int):
                raise UnsupportedError(
                    f"cannot shard {what} on dim {dim}: its size {value.shape[dim]} is dynamic, and {program.mesh} has "
                    "unequal shares, which cut static dims only",
                    help="export with that dim static, or leave it whole",
                    asked_by=asked_by,
                )
            if cut.axes:
                yield what, value, dim, program.mesh.size(cut.axes), asked_by
    for node in edit.calls(program.graph):
        if (turns := node.meta.get(IN_TURNS)) is not None:
            for _, operand, parts in dealt_out(node, turns.axis, program.mesh, device_type):
                yield f"'{operand.name}'", edit.fake(operand), STEPS, parts, turns.asked_by


def _placed(program: PlannedProgram) -> Iterator[tuple[str, torch.Tensor, Sharding, str]]:
    """Yield (what, value, sharding, asked_by) for every value with a requested sharding."""
    inputs = set(program.user_inputs())
    for node in program.graph.nodes:
        if node in inputs:
            constraint = program.constraints[node.name]
            yield f"input '{node.name}'", edit.fake(node), constraint.sharding, constraint.asked_by
        elif PIN in node.meta:
            (operand,) = edit.operands(node)
            yield f"'{operand.name}'", edit.fake(node), node.meta[PIN].sharding, node.meta[PIN].asked_by
