"""An exported program and how it is to be converted: mesh, plan, boundary, device."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from os.path import basename
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from torch.export import ExportedProgram

from tpcompiler.cost.collective import Collectives
from tpcompiler.frontend.plain_weights import drop_replaced, unwrap_subclasses
from tpcompiler.ir.devices import device_type_for
from tpcompiler.ir.invariants import check_invariants
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.placements import format_spec, parse_placement
from tpcompiler.ir.program import CanonicalProgram, Note, Program
from tpcompiler.ir.symm_mem import refuse_symm_mem
from tpcompiler.ir.text import program_text
from tpcompiler.passes.apply_plan import Boundary, names_of
from tpcompiler.passes.canonicalize import canonicalize
from tpcompiler.plan.plan import Plan
from tpcompiler.plan.share import share_plan
from tpcompiler.runtime.artifact import Manifest
from tpcompiler.runtime.records import Asked, StageRecord
from tpcompiler.solver.solution import Solution
from tpcompiler.solver.task import Aim

P = TypeVar("P", bound=Program)


class After(Protocol):
    """A hook that receives each pass's result and returns it."""

    def __call__(self, program: P, name: str) -> P: ...


def unseen(program: P, name: str) -> P:
    """Return the program of a pass without a dump."""
    return program


@dataclass(frozen=True)
class Conversion:
    """An exported program in canonical form, and how it is to be converted.

    `family`: the name of the first of several programs that share their tensors by name. `stage`: which part of the
    program `whole` it is. `cuts_batch`: the search places the inputs, and outputs that the boundary does not.
    """

    exported: ExportedProgram
    program: CanonicalProgram
    mesh: Mesh
    plan: Plan
    boundary: tuple[Boundary, Boundary]
    device: str
    after: After
    collectives: Collectives
    check_indices: bool = True
    keep_repeats: bool = False
    dropped: tuple[Note, ...] = ()
    family: str = ""
    stage: StageRecord | None = None
    whole: ExportedProgram | None = None
    cuts_batch: bool = False

    @classmethod
    def of(
        cls,
        exported: ExportedProgram,
        mesh: Mesh,
        plan: Plan,
        boundary: tuple[Boundary, Boundary],
        device_type: str | None,
        dump: str | os.PathLike[str] | None,
        collectives: Collectives,
        check_indices: bool = True,
        keep_repeats: bool = False,
    ) -> Conversion:
        after = Dump(dump)
        exported, dropped = drop_replaced(unwrap_subclasses(exported))
        program = after(canonicalize(exported), "canonicalize")
        device, plan = device_type_for(program, device_type), plan.fitted(names_of(program))
        if collectives != "nccl":
            refuse_symm_mem(device)
        ways = collectives, check_indices, keep_repeats
        return cls(exported, program, mesh, plan, boundary, device, after, *ways, dropped)

    def with_styles(self, *each: Mapping[str, str]) -> Conversion:
        """Return it with these styles for the names that its plan does not name, one mapping after the other."""
        plan, names = self.plan, names_of(self.program) if any(each) else []
        for styles in each:
            own = {name: styles[name] for name in names if name in styles}
            plan = plan.completed(own, names) if own else plan
        return replace(self, plan=plan)

    def completed(self, found: Solution) -> Plan:
        """Return the plan with the styles that the search found."""
        if self.plan.gathers:
            return Plan()
        return self.plan.completed(found.styles, names_of(self.program)) if self.plan.searches else self.plan

    def asked(self, plan: Plan, aim: Aim) -> Asked:
        """Return the caller's other arguments, as `Manifest.asked`; `plan`: completed."""
        inputs, outputs = map(_said, self.boundary)
        is_partial = self.plan.searches and len(self.plan.entries) > 1 and self.plan.to_data() != plan.to_data()
        return Asked(
            inputs=inputs,
            outputs=outputs,
            machine=basename(aim.machine.name),
            collectives=self.collectives,
            optimizer=aim.optimizer,
            check_indices=self.check_indices,
            keep_repeats=self.keep_repeats,
            plan="auto:free" if self.plan.gathers else self.plan.to_data() if is_partial else None,
        )


def share_conversions(conversions: Mapping[str, Conversion]) -> dict[str, Conversion]:
    """Several programs, each with the entries of the plan that it uses.

    Raises:
        PlanError: an entry matches in none of them.
    """
    programs = [own.program for own in conversions.values()]
    held, used = [names_of(each) for each in programs], [names_of(each, used=True) for each in programs]
    plans = share_plan([own.plan for own in conversions.values()], held, used)
    return {name: replace(own, plan=plan) for (name, own), plan in zip(conversions.items(), plans, strict=True)}


def _said(boundary: Boundary) -> Any:
    """The placements that a caller gave, as plain data."""
    if boundary is None:
        return None
    if isinstance(boundary, Mapping):
        return {name: format_spec(spec) for name, spec in boundary.items()}
    return [spec and format_spec(spec) for spec in boundary]


def asked_boundary(manifest: Manifest, at: Literal["inputs", "outputs"]) -> Any:
    """The placements of inputs or outputs that an artifact was asked for, as `parallelize` takes them."""
    said = manifest.asked.inputs if at == "inputs" else manifest.asked.outputs
    if isinstance(said, dict):
        return {name: _spec(spec) for name, spec in said.items()}
    return said and [spec and _spec(spec) for spec in said]


def _spec(said: Any) -> Any:
    if isinstance(said, dict):
        return {axis: parse_placement(each) for axis, each in said.items()}
    return parse_placement(said)


class Dump:
    """Checks each stage, and writes its text where a directory was given."""

    def __init__(self, directory: str | os.PathLike[str] | None) -> None:
        self.directory = None if directory is None else Path(directory)
        self.count = 0

    def __call__(self, program: P, name: str) -> P:
        if self.directory is not None:
            check_invariants(program)
            self.directory.mkdir(parents=True, exist_ok=True)
            (self.directory / f"{self.count:02}_{name}.txt").write_text(program_text(program), encoding="utf-8")
            self.count += 1
        return program
