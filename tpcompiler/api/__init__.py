"""The public functions that convert programs and search for plans."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from msgspec import structs
from torch.distributed.tensor import Placement
from torch.distributed.tensor.parallel import ParallelStyle
from torch.export import ExportedProgram

import tpcompiler.rules  # noqa: F401  (registers the rules)
from tpcompiler._torch import user_inputs
from tpcompiler.api.parallel_program import ParallelProgram
from tpcompiler.cost.amounts import read_memory
from tpcompiler.cost.collective import Collectives
from tpcompiler.cost.machine import Machine
from tpcompiler.cost.machine_file import read_machine
from tpcompiler.errors import InputsError, MeshError, PlanError, ProgramError, UnsupportedError, option
from tpcompiler.ir.gc_pause import collector_rests
from tpcompiler.ir.mesh import PIPELINE, Mesh, MeshLike
from tpcompiler.ir.optimizer import read_optimizer
from tpcompiler.parallel.conversion import Conversion, boundary_data, read_boundary, share_conversions
from tpcompiler.parallel.converted_program import ConvertedProgram, convert_programs
from tpcompiler.parallel.cut_batch import cut_batch
from tpcompiler.parallel.model_families import find_families
from tpcompiler.parallel.pipeline import find_placements
from tpcompiler.parallel.stages import StageProgram, mesh_of_stage, stage_programs
from tpcompiler.passes.apply_plan import names_of
from tpcompiler.plan.file import SEARCHES
from tpcompiler.plan.plan import Plan
from tpcompiler.plan.share import join_plans
from tpcompiler.runtime.artifact import SINGLE, is_single
from tpcompiler.runtime.beside import families
from tpcompiler.runtime.place import place_state
from tpcompiler.runtime.records import Asked, Optimizer, PlacedBoundary
from tpcompiler.solver.task import Aim, Goal

SEVERAL = (Mapping, list, tuple)  # types that hold several programs
DEGREES = '{"draft": 1}'
WEIGHTS = '{"prefill": 1, "decode": 256}'
Given = Mapping[str, Any] | Sequence[Any] | None  # or "auto", for inputs
AUTO = "auto"
BY_DEFAULT = Asked(inputs=None, outputs=None)
Programs = Mapping[str, ExportedProgram] | Sequence[tuple[str, ExportedProgram]]


class Cutting(NamedTuple):
    """The machine that stages are balanced for, the most bytes of a rank, and the calls of each program."""

    machine: Machine
    limit: int | None = None
    calls: Mapping[str, float] = MappingProxyType({})


@collector_rests()
def parallelize(
    exported_program: ExportedProgram | Programs,
    mesh: MeshLike,
    plan: Plan | Mapping[str, object] | str | os.PathLike[str] = "auto",
    *,
    inputs: Given = None,
    outputs: Given = None,
    device_type: str | None = None,
    collectives: Collectives = "nccl",
    check_indices: bool = True,
    keep_repeats: bool = False,
    machine: str | os.PathLike[str] | None = None,
    memory: int | str | None = None,
    optimize: Goal = "latency",
    optimizer: Optimizer = "adamw",
    weights: Mapping[str, float] | None = None,
    degrees: Mapping[str, int] | None = None,
    dump: str | os.PathLike[str] | None = None,
) -> ParallelProgram:
    """Turn a single-device exported program into one program per rank, without GPUs or launched processes.

    Args:
        exported_program: a program of `torch.export.export`, which is not changed. Or several by name, such as
            prefill and decode, that share weights and caches, which get the same placements in all of them.
        mesh: the degree of a single axis `tp`, or `{axis: degree}`.
        plan: a `Plan`, `{FQN pattern: style}`, the path of a YAML file with such a mapping, or "auto", the default: the
            cheapest placements that the search finds (docs/auto.md); "auto:free" may also gather weights, and cut the
            batch. With `"**": "auto"` in a mapping, the search places everything that its other entries do not name.
        inputs: placements of the user's tensors, by name or in order: "R" (the default), "S(0)", torch placements; for
            several programs, {program's name: these}. With "auto" the batch, dim 0 of inputs and outputs, is cut over
            each axis of the mesh over which calls are predicted to be faster so; callers then pass shards.
        outputs: placements of the returned tensors, in the same form.
        device_type: "cpu" or "cuda", even without such a device; by default that of the program's tensors.
        collectives: the backend: "nccl" (gloo on a CPU); "symm_mem", for an all_reduce torch's op over memory that
            GPUs map from each other, wherever supported; "auto", only where expected to be faster (docs/gpu.md).
        check_indices: if an indexed dim is cut, assert in the ranks' programs that computed indices are in the whole
            dim. Without it, indices out of range read zeros or write nothing, and do not raise.
        keep_repeats: repeat heads of keys and values for their groups of queries where the model does. By default
            attention reads each head as it is stored, wherever fewer bytes are moved so (docs/decoding.md).
        machine: the YAML file that describes one device and its links (docs/machines.md), or the name of one in
            the package; by default that in the environment variable TPCOMPILER_MACHINE, or "h100".
        memory: limit on a rank's bytes (or "24GB"): weights, caches, inputs, and activations at their estimated peak;
            of a program with gradients also these and the state of the optimizer. By default 0.9 of the machine's,
            less 0.4 GB for NCCL; none if a plan names all layers and no machine is given.
        optimize: the goal of the search: "latency", the fastest call that fits; "memory", the fewest bytes of weights
            on a rank, and among equals the fastest call.
        optimizer: whose state counts as memory next to the parameters of a program with gradients: "adamw" (two float32
            numbers for each element), "sgd" (with momentum: one) or "none".
        weights: the number of calls of several programs, by name: {"prefill": 1, "decode": 256}. By default all
            count the same.
        degrees: programs of several that run over fewer ranks than the mesh has, by name: {"draft": 1} runs the draft
            model whole on every rank, and with 2 of 4 ranks there are two copies. A plan shards them over their
            own ranks. They share tensors with programs of the same degree only.
        dump: a directory for a numbered text of the program after every pass.

    Raises:
        PlanError, MeshError, MachineError, InputsError, ShardingError, ProgramError, UnsupportedError: each with its
            cause, place, numbers and one action.
    """
    read, limit = read_plan(plan), None if memory is None else read_memory(memory)
    asked = _read_asked(collectives=collectives, check_indices=check_indices, keep_repeats=keep_repeats)
    cutting = Cutting(read_machine(machine), limit, weights or {})
    conversions = conversions_of(
        exported_program, mesh, read, inputs, outputs, asked, device_type, dump=dump, degrees=degrees, cutting=cutting
    )
    calls = _calls_of(weights, conversions)
    made = dict[str, ConvertedProgram]()
    for family in families(conversions, lambda own: own.family):
        aim = _aim(machine, limit, optimize, optimizer, calls, family, read.searches, collectives)
        made |= convert_programs(cut_batch(family, aim), aim)[1]
    return ParallelProgram({name: made[name] for name in conversions})


@collector_rests()
def find_plan(
    exported_program: ExportedProgram | Programs,
    mesh: MeshLike,
    plan: Plan | Mapping[str, object] | str | os.PathLike[str] = "auto",
    *,
    inputs: Given = None,
    outputs: Given = None,
    machine: str | os.PathLike[str] | None = None,
    memory: int | str | None = None,
    optimize: Goal = "latency",
    optimizer: Optimizer = "adamw",
    weights: Mapping[str, float] | None = None,
    degrees: Mapping[str, int] | None = None,
) -> Plan:
    """Return the plan that the search finds; `parallelize` turns it into the same programs as "auto".

    All arguments except `plan` are those of `parallelize`.

    Args:
        plan: a plan for some layers, which the search keeps while it places the rest.

    Raises:
        PlanError, MeshError, MachineError, ShardingError, ProgramError, UnsupportedError: as `parallelize`.
    """
    given, limit = read_plan(plan).with_search(), None if memory is None else read_memory(memory)
    cutting = Cutting(read_machine(machine), limit, weights or {})
    conversions = conversions_of(exported_program, mesh, given, inputs, outputs, degrees=degrees, cutting=cutting)
    calls, plans = _calls_of(weights, conversions), []
    for family in families(conversions, lambda own: own.family):
        aim = _aim(machine, limit, optimize, optimizer, calls, family, searches=True)
        cut = cut_batch(family, aim)
        found = find_placements([*cut.values()], aim)
        formed = [own.with_styles(*found.forms) for own in cut.values()]
        names = [name for own in formed for name in names_of(own.program)]
        plans.append(join_plans([own.plan for own in formed]).completed(found.styles, names))
    return join_plans(plans)


def conversions_of(
    exported_program: ExportedProgram | Programs,
    mesh: MeshLike,
    plan: Plan,
    inputs: Given = None,
    outputs: Given = None,
    asked: Asked = BY_DEFAULT,
    device_type: str | None = None,
    *,
    dump: str | os.PathLike[str] | None = None,
    degrees: Mapping[str, int] | None = None,
    cutting: Cutting | None = None,
) -> dict[str, Conversion]:
    """Turn the arguments of `parallelize` into conversions by program; without `cutting`, nobody cuts a batch.

    Args:
        asked: arguments that all programs have in common.
    """
    mesh = Mesh.of(mesh)
    by_program = inputs.values() if isinstance(inputs, Mapping) and isinstance(exported_program, SEVERAL) else ()
    if cutting is None and AUTO in (inputs, *by_program):
        raise PlanError(f"inputs={AUTO!r} where meshes are compared", help="place the batch by hand")
    several = _named(exported_program) if isinstance(exported_program, SEVERAL) else {}
    meshes = _meshes(mesh, degrees or {}, several)

    def convert(name: str, program: Any, mesh: Mesh, inputs: Given, outputs: Given) -> Conversion:
        own = structs.replace(asked, inputs=_placed(inputs, "input"), outputs=_placed(outputs, "output"))
        folder = dump and (Path(dump) if name == SINGLE else Path(dump) / name)
        return replace(Conversion.of(program, mesh, plan, own, device_type, folder), cuts_batch=inputs == AUTO)

    if PIPELINE in dict(mesh.axes):
        cutting = cutting or Cutting(read_machine())
        stages = stage_programs(several or {SINGLE: exported_program}, mesh, *cutting)  # type: ignore[dict-item]
        conversions = {
            name: replace(
                convert(
                    name,
                    stage.program,
                    mesh_of_stage(mesh),
                    _of_stage(inputs, stage, several, "input"),
                    _of_stage(outputs, stage, several, "output"),
                ),
                stage=stage.record,
                whole=stage.whole,
            )
            for name, stage in stages.items()
        }
    elif several:
        conversions = {
            name: convert(name, program, meshes[name], _of(inputs, name), _of(outputs, name))
            for name, program in several.items()
        }
    else:  # the first pass rejects anything that is not a program
        return {SINGLE: convert(SINGLE, exported_program, mesh, inputs, outputs)}
    return share_conversions(find_families(conversions))


def _of_stage(given: Given, stage: StageProgram, several: Collection[str], what: str) -> dict[str, Any]:
    """Return the placements of the inputs or outputs that a stage has, by name."""
    if AUTO in (given, _of(given, stage.record.of) if several else given):
        raise PlanError(f"{what}s={AUTO!r} on a mesh with the axis {PIPELINE}", help="place the batch by hand")
    specs = _placed(_of(given, stage.record.of) if several else given, what)
    names = stage.record.inputs if what == "input" else stage.record.returns
    named = specs if isinstance(specs, dict) else dict(zip(names, specs or [], strict=False))
    own = {spec.arg.name for spec in user_inputs(stage.program)} if what == "input" else {*stage.record.outputs}
    return {name: spec for name, spec in named.items() if spec is not None and name in own}


def _calls_of(weights: Mapping[str, float] | None, conversions: Mapping[str, Conversion]) -> dict[str, float]:
    """Return the number of calls of each program, stages included; empty if all count the same."""
    wholes = {name: own.stage.of if own.stage else name for name, own in conversions.items()}
    calls = read_calls(weights, dict.fromkeys(wholes.values()))
    return {name: calls[whole] for name, whole in wholes.items()} if calls else {}


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


def read_plan(plan: Plan | Mapping[str, object] | str | os.PathLike[str]) -> Plan:
    """Read a plan as `parallelize` does, including "auto", which leaves everything to the search."""
    return replace(Plan().with_search(), gathers=plan == "auto:free") if plan in SEARCHES else Plan.of(plan)


def _aim(
    machine: str | os.PathLike[str] | None,
    memory: int | None,
    optimize: Goal,
    optimizer: str,
    calls: Mapping[str, float],
    programs: Iterable[str],
    searches: bool,
    collectives: Collectives = "nccl",
) -> Aim:
    described = read_machine(machine).using(collectives)
    is_limited = memory is not None or machine is not None or searches
    limit = described.usable_memory if memory is None else memory
    own = tuple(calls[name] for name in programs) if calls else ()
    return Aim(described, limit if is_limited else None, optimize, own, optimizer=read_optimizer(optimizer))


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


def tensor_parallel_transformation(
    exported_program: ExportedProgram,
    rank: int,
    world_size: int,
    device_type: str,
    parallel_strategies: Mapping[str, ParallelStyle | type[ParallelStyle] | str],
) -> ExportedProgram:
    """Return the program of one rank: a drop-in for `torch.distributed.tensor.experimental._tp_transform`.

    Inside an initialised process group of `world_size` ranks the program uses that group by its name; without one it
    uses the logical name of a mesh `tp=<world_size>`, which `tpcompiler.load` registers.

    Args:
        device_type: "cpu" or "cuda". The rank's weights are moved there, to the current device, if there is one.
        parallel_strategies: layer FQN (or pattern) -> torch style class or instance, or a style's name.

    Raises:
        MeshError: `rank` is outside the world, or the running process group has another size.
    """
    mesh = Mesh.of(world_size)
    mesh.coordinate(rank)
    if dist.is_initialized():
        if dist.get_world_size() != world_size:
            raise MeshError(
                f"world_size is {world_size}, the running process group has {dist.get_world_size()} ranks",
                help="pass the group's size, or call this outside of a process group",
            )
        world = dist.group.WORLD
        assert world is not None
        mesh = Mesh(mesh.axes, group_of_world=world.group_name)
    program = parallelize(exported_program, mesh, dict(parallel_strategies), device_type=device_type).rank_program(rank)
    if device_type != "cuda" or torch.cuda.is_available():
        place_state(program, device_type)
    return program


def _read_asked(**given: object) -> Asked:
    """Return the arguments that all programs have in common.

    Raises:
        InputsError: one has another type, or a value that it cannot have.
    """
    try:
        return msgspec.convert(structs.asdict(BY_DEFAULT) | given, Asked)
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
