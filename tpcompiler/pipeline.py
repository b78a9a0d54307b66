"""The passes in order, for one program or for several that share their weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from torch.export import ExportedProgram

import tpcompiler.rules  # noqa: F401  (registers the rules)
from passes.apply_plan import Boundary, apply_plan, names_of
from passes.canonicalize import canonicalize
from passes.delay_reductions import delay_reductions
from passes.divide_sizes import divide_sizes
from passes.fold_reshards import fold_reshards
from passes.insert_reshards import insert_reshards
from passes.join_branches import join_branches
from passes.mark_placements import mark_placements
from passes.recut_leaves import recut_leaves
from tpcompiler._torch import FakeTensor
from tpcompiler.advice import advised, remembered, without_gather
from tpcompiler.auto import find_plan, search, shorten
from tpcompiler.cost.program import changes
from tpcompiler.errors import ProgramError, ShardingError
from tpcompiler.ir.collector import collector_rests
from tpcompiler.ir.devices import device_type_for
from tpcompiler.ir.local import no_new_guards
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.placements import format_spec
from tpcompiler.ir.program import CanonicalProgram, MarkedProgram, PlannedProgram, Program, Seed, mark_of
from tpcompiler.ir.sharding import Sharding
from tpcompiler.ir.split_axis import on_split_axis
from tpcompiler.ir.symm_mem import Collectives, refuse_symm_mem
from tpcompiler.ir.text import program_text
from tpcompiler.parallel_program import ParallelProgram
from tpcompiler.plan import Plan
from tpcompiler.verify.invariants import check_invariants

After = Callable[[Any, str], Any]


class Agreed(NamedTuple):
    """How another program places the leaves that are also this one's."""

    whose: str
    mesh: Mesh
    shardings: Mapping[str, Sharding]


@dataclass(frozen=True)
class Conversion:
    """One exported program on its way, its plan and boundary known."""

    exported: ExportedProgram
    program: CanonicalProgram
    mesh: Mesh
    plan: Plan
    boundary: tuple[Boundary, Boundary]
    device: str
    after: After
    collectives: Collectives
    auto: bool = False  # no plan was given: the search decides
    styles: dict[str, str] = field(default_factory=dict)  # that it found, by layer

    @classmethod
    @collector_rests()
    def of(
        cls,
        exported: ExportedProgram,
        mesh: Mesh,
        plan: Plan | None,
        boundary: tuple[Boundary, Boundary],
        device_type: str | None,
        dump: str | os.PathLike[str] | None,
        collectives: Collectives,
    ) -> Conversion:
        after = Dump(dump)
        program = after(canonicalize(exported), "canonicalize")
        device, auto = device_type_for(program, device_type), plan is None and len(mesh.axes) == 1
        if plan is None:
            plan = Plan() if auto else find_plan(program, mesh, boundary)
        plan = plan.fitted(names_of(program))
        if collectives != "nccl":
            refuse_symm_mem(device)
        return cls(exported, program, mesh, plan, boundary, device, after, collectives, auto)

    def marked(self, plan: Plan, after: After, agreed: Agreed | None = None) -> MarkedProgram:
        with no_new_guards(self.program.graph):
            planned = after(apply_plan(self.program, plan, self.mesh, *self.boundary), "apply_plan")
            joined = after(join_branches(planned), "join_branches")
            divided = after(divide_sizes(joined), "divide_sizes")
        if self.auto:
            with no_new_guards(divided.graph):
                found, styles = search(_as_agreed(divided, agreed), self.mesh)
            self.styles.update(styles)
            return after(found, "mark_solution")  # type: ignore[no-any-return]
        with no_new_guards(divided.graph):
            recut = after(recut_leaves(_as_agreed(divided, agreed)), "recut_leaves")
            marked: MarkedProgram = after(mark_placements(recut), "mark_placements")
        return marked

    @collector_rests()
    def finished(self, agreed: Agreed | None = None) -> ParallelProgram:
        """All passes up to the program for all ranks."""
        trial = remembered(lambda plan: self.marked(plan, lambda made, _: made, agreed))
        try:
            marked = self.marked(self.plan, self.after, agreed)
        except ShardingError as error:
            if self.auto:
                raise
            raise advised(error, self.plan, trial) from None
        with no_new_guards(marked.graph):
            resharded = self.after(insert_reshards(marked), "insert_reshards")
            delayed = self.after(delay_reductions(resharded), "delay_reductions")
            folded = self.after(fold_reshards(delayed), "fold_reshards")
        made = ParallelProgram(
            self.exported,
            folded,
            Plan.of(shorten(self.styles)) if self.auto else self.plan,
            self.device,
            lambda value: "" if self.auto else without_gather(value, marked, self.plan, trial),
            {"mesh": dict(self.mesh.axes), **dict(zip(("inputs", "outputs"), map(_said, self.boundary), strict=True))},
            self.collectives,
        )
        self.after(made.local_program(0), "lowered_rank_0")
        return made


def _said(boundary: Boundary) -> Any:
    """The placements that a caller gave, as plain data."""
    if boundary is None:
        return None
    if isinstance(boundary, Mapping):
        return {name: format_spec(spec) for name, spec in boundary.items()}
    return [spec and format_spec(spec) for spec in boundary]


def finished_together(conversions: Mapping[str, Conversion]) -> dict[str, ParallelProgram]:
    """The programs, with every leaf that several have placed alike: as that one does that makes all together cheapest.

    Raises:
        ProgramError: a leaf of one name that is not one tensor.
        ShardingError: no program's placements suit all others.
    """
    _same_leaves(conversions)
    alone = {name: conversion.marked(conversion.plan, _quiet) for name, conversion in conversions.items()}
    found = {name: _placed(name, marked) for name, marked in alone.items()}
    if all(_agree(one, other) for one in found.values() for other in found.values()):
        return {name: conversion.finished() for name, conversion in conversions.items()}
    costs: dict[str, int] = {}
    refused = None
    for name, agreed in found.items():
        try:
            costs[name] = sum(_cost(c.marked(c.plan, _quiet, agreed)) for c in conversions.values())
        except ShardingError as error:
            refused = error
    if not costs and refused is not None:
        raise refused
    best = found[min(costs, key=lambda name: costs[name])]
    return {name: conversion.finished(best) for name, conversion in conversions.items()}


def _quiet(made: Any, _: str) -> Any:
    return made


def _cost(marked: MarkedProgram) -> int:
    return sum(change.wire_bytes for change in changes(marked))


def _placed(name: str, marked: MarkedProgram) -> Agreed:
    return Agreed(name, marked.mesh, {fqn: mark_of(node).settled[0] for node, fqn in marked.leaves()})


def _agree(one: Agreed, other: Agreed) -> bool:
    both = one.shardings.keys() & other.shardings.keys()
    return one.mesh == other.mesh and all(one.shardings[fqn] == other.shardings[fqn] for fqn in both)


def _as_agreed(program: PlannedProgram, agreed: Agreed | None) -> PlannedProgram:
    if agreed is None:
        return program
    for axis, _ in program.mesh.axes:
        if axis not in agreed.mesh.names:
            program = on_split_axis(program, axis, agreed.mesh.degree(f"{axis}_0"))
    own = {
        node.name: Seed(agreed.shardings[fqn], f"as program '{agreed.whose}' places it")
        for node, fqn in program.leaves()
        if fqn in agreed.shardings
    }
    return replace(program, seeds={**program.seeds, **own})


def _same_leaves(conversions: Mapping[str, Conversion]) -> None:
    first: dict[str, tuple[str, CanonicalProgram]] = {}
    for name, conversion in conversions.items():
        for _, fqn in conversion.program.leaves():
            known, program = first.setdefault(fqn, (name, conversion.program))
            ours, theirs = conversion.program.state(fqn), program.state(fqn)
            # Of weights without values a checkpoint says, by name, what they are.
            unknown = isinstance(ours, FakeTensor) and isinstance(theirs, FakeTensor)
            if ours.shape != theirs.shape or ours.dtype != theirs.dtype or not (unknown or ours.equal(theirs)):
                raise ProgramError(
                    f"'{fqn}' is {list(theirs.shape)} of {theirs.dtype} in program '{known}' and {list(ours.shape)} of "
                    f"{ours.dtype} in '{name}', or its values differ",
                    help="export all programs from one model, one after the other, with nothing run in between",
                )


class Dump:
    """Checks each stage, and writes its text where a directory was given."""

    def __init__(self, directory: str | os.PathLike[str] | None) -> None:
        self.directory = None if directory is None else Path(directory)
        self.count = 0

    def __call__(self, program: Any, name: str) -> Any:
        if self.directory is not None:
            assert isinstance(program, Program)
            check_invariants(program)
            self.directory.mkdir(parents=True, exist_ok=True)
            (self.directory / f"{self.count:02}_{name}.txt").write_text(program_text(program), encoding="utf-8")
            self.count += 1
        return program
