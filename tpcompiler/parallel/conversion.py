"""An exported program and how it is to be converted: mesh, plan, boundary, device."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from os.path import basename
from pathlib import Path
from typing import Any, TypeVar

from msgspec import structs
from torch.export import ExportedProgram

from tpcompiler.cost.machine import Machine
from tpcompiler.frontend.plain_weights import drop_replaced, unwrap_subclasses
from tpcompiler.ir.devices import device_type_for
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.placements import format_spec, read_spec
from tpcompiler.ir.program import CanonicalProgram, Note, Program, check_invariants
from tpcompiler.ir.symm_mem import refuse_symm_mem
from tpcompiler.ir.text import program_text
from tpcompiler.passes.apply_plan import Boundary, names_of
from tpcompiler.passes.canonicalize import canonicalize
from tpcompiler.plan.plan import Plan, share_plan
from tpcompiler.runtime.records import Asked, PlacedBoundary, StageRecord
from tpcompiler.solver.solution import Solution

P = TypeVar("P", bound=Program)


@dataclass(frozen=True)
class Conversion:
    """An exported program in canonical form, and how it is to be converted.

    `asked`: the caller's other arguments. `machine`: where a call is to be fast. `family`: the name of the first of
    several programs that share their tensors by name. `stage`: which part of the program `whole` it is. `cuts_batch`:
    the search places the inputs, and outputs that the boundary does not.
    """

    exported: ExportedProgram
    program: CanonicalProgram
    mesh: Mesh
    plan: Plan
    asked: Asked
    machine: Machine
    device: str
    after: Dump
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
        asked: Asked,
        machine: Machine,
        device_type: str | None = None,
        dump: str | os.PathLike[str] | None = None,
    ) -> Conversion:
        after = Dump(dump)
        exported, dropped = drop_replaced(unwrap_subclasses(exported))
        program = after(canonicalize(exported), "canonicalize")
        device, plan = device_type_for(program, device_type), plan.fitted(names_of(program))
        if asked.collectives != "nccl":
            refuse_symm_mem(device)
        return cls(exported, program, mesh, plan, asked, machine, device, after, dropped)

    @property
    def boundary(self) -> tuple[Boundary, Boundary]:
        """The placements of inputs and of outputs that the caller gave."""
        return read_boundary(self.asked.inputs), read_boundary(self.asked.outputs)

    def with_boundary(self, inputs: Boundary, outputs: Boundary) -> Conversion:
        return self.with_asked(inputs=boundary_data(inputs), outputs=boundary_data(outputs))

    def with_asked(self, **given: Any) -> Conversion:
        return replace(self, asked=structs.replace(self.asked, **given))

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

    def asked_of(self, plan: Plan) -> Asked:
        """Return the caller's arguments as the manifest keeps them; `plan`: completed."""
        is_partial = self.plan.searches and len(self.plan.entries) > 1 and self.plan.to_data() != plan.to_data()
        return structs.replace(
            self.asked,
            machine=basename(self.machine.name),
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


def boundary_data(boundary: Boundary) -> PlacedBoundary:
    """Return placements as plain data."""
    if boundary is None:
        return None
    if isinstance(boundary, Mapping):
        return {name: format_spec(spec) for name, spec in boundary.items()}
    return [None if spec is None else format_spec(spec) for spec in boundary]


def read_boundary(given: Any, asked_by: str = "") -> Boundary:
    """Read placements by name, or in order.

    Raises:
        PlanError: a value that is no placement.
    """
    if isinstance(given, Mapping):
        return {name: read_spec(spec, asked_by) for name, spec in given.items() if spec is not None}
    return given and [None if spec is None else read_spec(spec, asked_by) for spec in given]


class Dump:
    """A hook that receives each pass's result and returns it; checks it, and writes its text, if given a directory."""

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


UNSEEN = Dump(None)
