"""A conversion as it is asked for: programs, mesh, plan, boundary, machine, limits and goal."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any, get_args

import msgspec
from msgspec import structs
from torch.distributed.tensor import Placement
from torch.export import ExportedProgram

from tpcompiler._torch import user_inputs
from tpcompiler.cost.amounts import read_memory
from tpcompiler.cost.machine import Machine
from tpcompiler.cost.machine_file import read_machine
from tpcompiler.errors import InputsError, MeshError, PlanError, ProgramError, UnsupportedError, option
from tpcompiler.ir.mesh import PIPELINE, Mesh, MeshLike
from tpcompiler.parallel.conversion import Conversion, boundary_data, read_boundary, share_conversions
from tpcompiler.parallel.model_families import find_families
from tpcompiler.parallel.stages import StageProgram, mesh_of_stage, stage_programs
from tpcompiler.plan.file import SEARCHES
from tpcompiler.plan.plan import Plan
from tpcompiler.runtime.artifact import SINGLE, is_single
from tpcompiler.runtime.records import Asked, Collectives, Goal, Optimizer, PlacedBoundary

SEVERAL = (Mapping, list, tuple)  # types that hold several programs
DEGREES = '{"draft": 1}'
WEIGHTS = '{"prefill": 1, "decode": 256}'
Given = Mapping[str, Any] | Sequence[Any] | None  # or "auto", for inputs
AUTO = "auto"
Programs = Mapping[str, ExportedProgram] | Sequence[tuple[str, ExportedProgram]]
PlanLike = Plan | Mapping[str, object] | str | os.PathLike[str]


@dataclass(frozen=True)
class Request:
    """The arguments of `parallelize`, as they were given."""

    exported_program: ExportedProgram | Programs
    mesh: MeshLike
    plan: PlanLike = AUTO
    inputs: Given = None
    outputs: Given = None
    _: KW_ONLY
    device_type: str | None = None
    collectives: Collectives = "nccl"
    check_indices: bool = True
    keep_repeats: bool = False
    machine: Machine | str | os.PathLike[str] | None = None
    memory: int | str | None = None
    optimize: Goal = "latency"
    optimizer: Optimizer = "adamw"
    weights: Mapping[str, float] | None = None
    degrees: Mapping[str, int] | None = None
    dump: str | os.PathLike[str] | None = None

    def conversions(self) -> dict[str, Conversion]:
        """Return the conversion of each program, stages and all.

        Raises:
            PlanError, MeshError, MachineError, InputsError, ProgramError, UnsupportedError: as `parallelize`.
        """
        described = self.machine if isinstance(self.machine, Machine) else read_machine(self.machine)
        plan, machine = read_plan(self.plan), described.using(self.collectives)
        memory = None if self.memory is None else read_memory(self.memory)
        is_limited = self.machine is not None or plan.searches
        asked = _read_asked(
            collectives=self.collectives,
            check_indices=self.check_indices,
            keep_repeats=self.keep_repeats,
            memory=machine.usable_memory if memory is None and is_limited else memory,
            optimize=self.optimize,
            optimizer=self.optimizer,
        )
        mesh, programs = Mesh.of(self.mesh), self.exported_program
        several = _named(programs) if isinstance(programs, SEVERAL) else {}
        meshes = _meshes(mesh, self.degrees or {}, several)

        def convert(name: str, program: Any, mesh: Mesh, inputs: Given, outputs: Given) -> Conversion:
            own = structs.replace(asked, inputs=_placed(inputs, "input"), outputs=_placed(outputs, "output"))
            folder = self.dump and (Path(self.dump) if name == SINGLE else Path(self.dump) / name)
            made = Conversion.of(program, mesh, plan, own, machine, self.device_type, folder)
            return replace(made, cuts_batch=inputs == AUTO)

        if PIPELINE in dict(mesh.axes):
            stages = stage_programs(several or {SINGLE: programs}, mesh, machine, memory, self.weights or {})  # type: ignore[dict-item]
            made = {
                name: replace(
                    convert(
                        name,
                        stage.program,
                        mesh_of_stage(mesh),
                        _of_stage(self.inputs, stage, several, "input"),
                        _of_stage(self.outputs, stage, several, "output"),
                    ),
                    stage=stage.record,
                    whole=stage.whole,
                )
                for name, stage in stages.items()
            }
        elif several:
            made = {
                name: convert(name, program, meshes[name], _of(self.inputs, name), _of(self.outputs, name))
                for name, program in several.items()
            }
        else:  # the first pass rejects anything that is not a program
            made = {SINGLE: convert(SINGLE, programs, mesh, self.inputs, self.outputs)}
        if not is_single(made):
            made = share_conversions(find_families(made))
        wholes = {name: own.stage.of if own.stage else name for name, own in made.items()}
        if calls := read_calls(self.weights, dict.fromkeys(wholes.values())):
            made = {name: own.with_asked(calls=calls[wholes[name]]) for name, own in made.items()}
        return made


def _of_stage(given: Given, stage: StageProgram, several: Collection[str], what: str) -> dict[str, Any]:
    """Return the placements of the inputs or outputs that a stage has, by name."""
    if AUTO in (given, _of(given, stage.record.of) if several else given):
        raise PlanError(f"{what}s={AUTO!r} on a mesh with the axis {PIPELINE}", help="place the batch by hand")
    specs = _placed(_of(given, stage.record.of) if several else given, what)
    names = stage.record.inputs if what == "input" else stage.record.returns
    named = specs if isinstance(specs, dict) else dict(zip(names, specs or [], strict=False))
    own = {spec.arg.name for spec in user_inputs(stage.program)} if what == "input" else {*stage.record.outputs}
    return {name: spec for name, spec in named.items() if spec is not None and name in own}


def _meshes(mesh: Mesh, degrees: Mapping[str, int], names: Collection[str]) -> dict[str, Mesh]:
    """Return the mesh of each of several programs; one with its own degree has the axis of the layers alone.

    Raises:
        PlanError: a degree for no program.
        MeshError: a degree that does not divide the ranks.
    """
    if unknown := sorted(degrees.keys() - set(names)):
        raise PlanError(
            f"{option('--degree', 'degrees')} names {unknown[0]!r}, and the programs are {', '.join(names) or 'one'}",
            help=f"give a degree to one of several programs: {option('draft=1', DEGREES)}",
        )
    made = {name: Mesh.of({mesh.model_axis: degree}) for name, degree in degrees.items()}
    for name, own in made.items():
        if mesh.world_size % own.world_size:
            raise MeshError(
                f"the degree of {name!r} is {own.world_size}, which does not divide the {mesh.world_size} ranks",
                help=f"give a divisor of {mesh.world_size}",
            )
    if made and PIPELINE in dict(mesh.axes):
        raise UnsupportedError("stages and other degrees in one artifact", help="convert the two by themselves")
    return dict.fromkeys(names, mesh) | made


def read_plan(plan: PlanLike) -> Plan:
    """Read a plan as `parallelize` does, including "auto", which leaves everything to the search."""
    return replace(Plan().with_search(), gathers=plan == "auto:free") if plan in SEARCHES else Plan.of(plan)


def read_calls(weights: Mapping[str, float] | None, names: Collection[str]) -> dict[str, float]:
    """Return the number of calls of each program by name; empty if all count the same.

    Raises:
        PlanError: the names are not the programs', or the numbers are not positive.
    """
    if weights is None:
        return {}
    if {*weights} != {*names} or not all(0 < weight < math.inf for weight in weights.values()):
        known = "one" if is_single(names) else ", ".join(names)
        raise PlanError(
            f"{option('--calls', 'weights')} are {dict(weights)}, and the programs are {known}",
            help=f"give each of several programs a number above 0: {option('prefill=1,decode=256', WEIGHTS)}",
        )
    return {name: float(weights[name]) for name in names}


def _named(programs: Programs) -> dict[str, ExportedProgram]:
    pairs = list(programs.items() if isinstance(programs, Mapping) else programs)
    names = [pair[0] if isinstance(pair, tuple) and len(pair) == 2 else pair for pair in pairs]
    texts = [name if isinstance(name, str) else type(name).__name__ for name in names]
    if not names or texts != names or len(set(texts)) < len(texts) or not all(name.isidentifier() for name in texts):
        raise ProgramError(
            f"several programs need a name each, got {texts}",
            help='give {"prefill": exported_program, "decode": exported_program}',
        )
    return dict(pairs)


def _of(given: Given, name: str) -> Given:
    """Return the placements for one of several programs."""
    if given is None or given == AUTO:
        return given
    if not isinstance(given, Mapping):
        raise PlanError(
            f"placements {given!r} do not say of which program they are", help="write {program's name: {...}}"
        )
    placements: Given = given.get(name)
    return placements


def _read_asked(**given: object) -> Asked:
    """Return the arguments that all programs have in common.

    Raises:
        InputsError: one has another type, or a value that it cannot have.
    """
    for name, words in (("collectives", Collectives), ("optimize", Goal), ("optimizer", Optimizer)):
        if given[name] not in get_args(words):
            known = ", ".join(get_args(words))
            raise InputsError(f"{option(f'--{name}', name)} is {given[name]!r}", help=f"name one of {known}")
    try:
        return msgspec.convert({"inputs": None, "outputs": None} | given, Asked)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$.")
        raise InputsError(f"{where.rstrip('`')}: {what}", help="see the arguments of parallelize") from None


def _placed(given: Given, what: str) -> PlacedBoundary:
    """Return the placements of inputs or outputs as plain data; none if they are left to the search."""
    if given is None or (given == AUTO and what == "input"):
        return None
    is_known = isinstance(given, Mapping | Sequence) and not isinstance(given, str | Placement)
    if not is_known or (isinstance(given, Mapping) and not all(isinstance(name, str) for name in given)):
        raise PlanError(
            f"{what}s={given!r} is neither a mapping of names nor a list",
            help='write {name: placement} or [placement, ...], such as ["S(0)"]',
        )
    return boundary_data(read_boundary(given, option(f"--{what}", f"{what}s=")))
