"""Small modules taken through the pipeline up to one stage."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.export import export

import tpcompiler.rules  # noqa: F401  (registers the rules)
from tests.machines import SLOW
from tpcompiler._torch import OpOverload
from tpcompiler.cost.machine_file import read_machine
from tpcompiler.cost.objective import Objective
from tpcompiler.ir import edit
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.placements import parse_placement
from tpcompiler.ir.program import (
    CanonicalProgram,
    LocalProgram,
    LoweredProgram,
    PlacedProgram,
    PlannedProgram,
    ShardedProgram,
    check_invariants,
)
from tpcompiler.ir.rank_numbers import name_rank_numbers, numbers_of_rank, numbers_read
from tpcompiler.passes.apply_plan import apply_plan
from tpcompiler.passes.canonicalize import canonicalize
from tpcompiler.passes.choose_paths import choose_paths
from tpcompiler.passes.divide_sizes import divide_sizes
from tpcompiler.passes.fold_reshards import fold_reshards
from tpcompiler.passes.localize_shapes import localize_shapes
from tpcompiler.passes.lower_reshards import lower_reshards
from tpcompiler.passes.place import place
from tpcompiler.passes.regions.join_branches import join_branches
from tpcompiler.passes.shard_state import shard_state
from tpcompiler.plan.plan import Plan
from tpcompiler.rules.registry import ops_with_rules
from tpcompiler.solver.report import note_search, refuse_unplaced, with_notes
from tpcompiler.solver.search import solve
from tpcompiler.solver.task import Task

Given = Mapping[str, str] | Sequence[str | None] | None


class Call(nn.Module):
    """A function as a module: `function(self, ...)` with parameters of the given shapes, buffers and submodules."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.forward = MethodType(function, self)
        for name, part in parts.items():
            if isinstance(part, tuple):
                part = nn.Parameter(torch.randn(part) / max(part[-1] if part else 1, 1) ** 0.5)
            if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)


aten = torch.ops.aten
# Ops with a rule that torch turns into others all the same, for they may give a view or a copy.
REWRITTEN = {
    aten.reshape.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.chunk.default,
    aten.contiguous.default,
    aten.to.dtype,
    aten.movedim.int,
}


def canonical(module: nn.Module, args: tuple[Any, ...], dynamic_shapes: Any = None) -> CanonicalProgram:
    """The canonical form; an exported program that has it already is spared torch's decomposition, which takes 0.2 s."""
    program = export(module, args, dynamic_shapes=dynamic_shapes)
    if all(_is_canonical(node.target) for node in edit.calls(program.graph)):
        graph = edit.copy_graph(program.graph)
        graph.eliminate_dead_code()
        return CanonicalProgram(program, graph)
    return canonicalize(program)


def _is_canonical(target: Any) -> bool:
    if not isinstance(target, OpOverload):
        return target is operator.getitem
    if target._schema.is_mutable or target in REWRITTEN:
        return False
    return target in ops_with_rules() or torch.Tag.pointwise in target.tags or target is torch.ops.aten.sym_size.int


def planned(
    module: nn.Module,
    args: tuple[Any, ...],
    plan: Mapping[str, object] = {},
    *,
    degree: int | list[int] = 2,
    inputs: Given = None,
    outputs: Given = None,
    dynamic_shapes: Any = None,
) -> PlannedProgram:
    program = canonical(module, args, dynamic_shapes)
    return apply_plan(program, Plan.of(plan), Mesh.of({"tp": degree}), _specs(inputs), _specs(outputs))


def _specs(given: Given) -> Any:
    if isinstance(given, Mapping):
        return {name: parse_placement(text) for name, text in given.items()}
    return None if given is None else [None if text is None else parse_placement(text) for text in given]


def divided(*args: Any, **kwargs: Any) -> PlannedProgram:
    return _checked(divide_sizes(join_branches(planned(*args, **kwargs))))


def placed(*args: Any, **kwargs: Any) -> PlacedProgram:
    task = Task([divided(*args, **kwargs)], Objective.of(read_machine()))
    found = solve(task)
    refuse_unplaced(task, found)
    (program,) = (with_notes(program, note_search(task, found)) for program in found.programs)
    return _checked(place(program, found))


def folded(*args: Any, **kwargs: Any) -> PlacedProgram:
    return _checked(fold_reshards(placed(*args, **kwargs)))


def routed(*args: Any, **kwargs: Any) -> PlacedProgram:
    return _checked(choose_paths(folded(*args, **kwargs), read_machine()))


def lowered(*args: Any, rank: int = 0, **kwargs: Any) -> LoweredProgram:
    return _checked(lower_reshards(routed(*args, **kwargs), (rank,), {}))


def local(*args: Any, rank: int = 0, **kwargs: Any) -> LocalProgram:
    return _checked(localize_shapes(lowered(*args, rank=rank, **kwargs), {}))


def sharded(program: LocalProgram, rank: int) -> ShardedProgram:
    row = numbers_of_rank(program, rank)
    return shard_state(program, rank, {name_rank_numbers(program): row} if row else {}, {})


def with_numbers(program: LocalProgram) -> LocalProgram:
    """Of one rank, whose numbers are put where they are read, so that the graph can be run."""
    for node in numbers_read(program.graph):
        ((value,),) = node.args
        node.target, node.args = torch.tensor, (value,)
    return program


def _checked(program: Any) -> Any:
    check_invariants(program)
    return program


def cuts_are_kept() -> Any:
    """A patch under which ops that are cut stay so, even where their operands are cheaper to gather than what they make."""
    return mock.patch.dict("os.environ", TPCOMPILER_MACHINE=SLOW)
