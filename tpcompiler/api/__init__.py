"""The pipeline on one page."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import torch
import torch.distributed as dist
from torch.distributed.tensor import Placement
from torch.distributed.tensor.parallel import ParallelStyle
from torch.export import ExportedProgram

import tpcompiler.rules  # noqa: F401  (registers the rules)
from tpcompiler.artifact.budget import Budget
from tpcompiler.checkpoint.fill import read_original, with_weights
from tpcompiler.cost.collective import Collectives
from tpcompiler.cost.machine_file import read_machine
from tpcompiler.errors import MeshError, PlanError, ProgramError, option
from tpcompiler.frontend.plain_weights import with_plain_weights
from tpcompiler.ir.collector import collector_rests
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.placements import PlacementSpec, parse_placement
from tpcompiler.judge.sound.check import CheckReport, check_artifact
from tpcompiler.parallel.compared import on_cpu
from tpcompiler.parallel.parallel_program import ParallelProgram
from tpcompiler.parallel.program_set import ProgramSet
from tpcompiler.passes.canonicalize import canonicalize
from tpcompiler.pipeline import Conversion, finished_together, plan_found, share_conversions
from tpcompiler.plan import SEARCHES, Plan
from tpcompiler.runtime.artifact import programs_in, read_manifest
from tpcompiler.runtime.place import place_state
from tpcompiler.solver.place import Aim, Goal

SEVERAL = (Mapping, list, tuple)  # programs
WEIGHTS = '{"prefill": 1, "decode": 256}'
Given = Mapping[str, Any] | Sequence[Any] | None
Programs = Mapping[str, ExportedProgram] | Sequence[tuple[str, ExportedProgram]]


@overload
def parallelize(
    exported_program: ExportedProgram,
    mesh: int | Mapping[str, int] | Mesh,
    plan: Plan | Mapping[str, object] | str | os.PathLike[str],
    *,
    inputs: Given = None,
    outputs: Given = None,
    device_type: str | None = None,
    collectives: Collectives = "nccl",
    check_indices: bool = True,
    machine: str | os.PathLike[str] | None = None,
    memory: int | None = None,
    optimize: Goal = "latency",
    weights: Mapping[str, float] | None = None,
    dump: str | os.PathLike[str] | None = None,
) -> ParallelProgram: ...


@overload
def parallelize(
    exported_program: Programs,
    mesh: int | Mapping[str, int] | Mesh,
    plan: Plan | Mapping[str, object] | str | os.PathLike[str],
    *,
    inputs: Given = None,
    outputs: Given = None,
    device_type: str | None = None,
    collectives: Collectives = "nccl",
    check_indices: bool = True,
    machine: str | os.PathLike[str] | None = None,
    memory: int | None = None,
    optimize: Goal = "latency",
    weights: Mapping[str, float] | None = None,
    dump: str | os.PathLike[str] | None = None,
) -> ProgramSet: ...


@collector_rests()
def parallelize(
    exported_program: ExportedProgram | Programs,
    mesh: int | Mapping[str, int] | Mesh,
    plan: Plan | Mapping[str, object] | str | os.PathLike[str],
    *,
    inputs: Given = None,
    outputs: Given = None,
    device_type: str | None = None,
    collectives: Collectives = "nccl",
    check_indices: bool = True,
    machine: str | os.PathLike[str] | None = None,
    memory: int | None = None,
    optimize: Goal = "latency",
    weights: Mapping[str, float] | None = None,
    dump: str | os.PathLike[str] | None = None,
) -> ParallelProgram | ProgramSet:
    """Turn a single-device exported program into one program per rank. Needs no GPU and no launched process.

    Args:
        exported_program: from `torch.export.export`, decomposed or not. It is not changed. Or several by name, such as
            prefill and decode, that share weights and caches: these are placed alike in all of them.
        mesh: the degree of the one axis `tp`, or `{axis: degree}`.
        plan: a `Plan`, `{FQN pattern: style}`, the path of a YAML file with such a mapping, or "auto": the cheapest
            placements that the search finds (docs/auto.md); "auto:free" may also gather weights and cut the batch.
            A mapping with `"**": "auto"` leaves to the search what its other entries do not name.
        inputs: placements of the user's tensors, by name or in order: "R" (the default), "S(0)", torch placements; of
            several programs, {program's name: these}.
        outputs: the same of what is returned.
        device_type: "cpu" or "cuda", for which no device need be at hand; by default where the program's tensors are.
        collectives: what sends: "nccl" (gloo on a CPU); "symm_mem", torch's ops over memory that GPUs map
            from each other, wherever these fit; "auto", where the machine's links are faster so (docs/gpu.md).
        check_indices: where an indexed dim is cut, assert in the ranks' programs that computed indices are in the whole
            dim. Without it those beyond give zeros, or write nothing, and do not raise as on a single device.
        machine: the YAML file that describes one device and its links (docs/auto.md), or the name of one that comes
            with the package; by default what the environment variable TPCOMPILER_MACHINE names, or "h100".
        memory: the most bytes that a rank may hold: weights, caches, inputs, and activations at their peak, estimated.
            By default 0.9 of the machine's, less 0.4 GB for NCCL; anything where a plan names all layers and no machine
            is given.
        optimize: what the search is for: "latency", the fastest call that fits; "memory", the fewest bytes of weights
            on a rank, and of those the fastest call.
        weights: of several programs, how often each is called, by name: {"prefill": 1, "decode": 256}. By default all
            count the same.
        dump: a directory for a numbered text of the program after every pass.

    Raises:
        PlanError, MeshError, MachineError, ShardingError, ProgramError, UnsupportedError: what, where, the numbers, one
            action.
    """
    read = read_plan(plan)
    conversions = conversions_of(
        exported_program, mesh, read, inputs, outputs, device_type, dump, collectives, check_indices
    )
    calls = read_calls(weights, conversions)
    made = finished_together(
        conversions, _aim(plan, machine, memory, optimize, calls, searches=read.searches, collectives=collectives)
    )
    return ProgramSet(made) if isinstance(exported_program, SEVERAL) else made[""]


@collector_rests()
def find_plan(
    exported_program: ExportedProgram | Programs,
    mesh: int | Mapping[str, int] | Mesh,
    plan: Plan | Mapping[str, object] | str | os.PathLike[str] = "auto",
    *,
    inputs: Given = None,
    outputs: Given = None,
    machine: str | os.PathLike[str] | None = None,
    memory: int | None = None,
    optimize: Goal = "latency",
    weights: Mapping[str, float] | None = None,
) -> Plan:
    """The plan that the search finds, which `parallelize` turns into the very programs that it makes of "auto".

    All but `plan` is as `parallelize` takes it.

    Args:
        plan: for some layers; the search decides the rest, and keeps to it.

    Raises:
        PlanError, MeshError, MachineError, ShardingError, ProgramError, UnsupportedError: as `parallelize`.
    """
    given = read_plan(plan).with_search()
    conversions = conversions_of(exported_program, mesh, given, inputs, outputs)
    calls = read_calls(weights, conversions)
    return plan_found(conversions, _aim(plan, machine, memory, optimize, calls, searches=True))


def conversions_of(
    exported_program: ExportedProgram | Programs,
    mesh: int | Mapping[str, int] | Mesh,
    plan: Plan,
    inputs: Given = None,
    outputs: Given = None,
    device_type: str | None = None,
    dump: str | os.PathLike[str] | None = None,
    collectives: Collectives = "nccl",
    check_indices: bool = True,
) -> dict[str, Conversion]:
    """What `parallelize` is given, by program; the name of one program alone is empty."""
    mesh = Mesh.of(mesh)
    if not isinstance(exported_program, SEVERAL):
        boundary = _specs(inputs, "input"), _specs(outputs, "output")
        one: Any = exported_program  # what is no program is refused by the first pass
        return {"": Conversion.of(one, mesh, plan, boundary, device_type, dump, collectives, check_indices)}
    conversions = {
        name: Conversion.of(
            program,
            mesh,
            plan,
            (_specs(_of(inputs, name), "input"), _specs(_of(outputs, name), "output")),
            device_type,
            dump and Path(dump) / name,
            collectives,
            check_indices,
        )
        for name, program in _named(exported_program).items()
    }
    return share_conversions(conversions)


def read_plan(plan: Plan | Mapping[str, object] | str | os.PathLike[str]) -> Plan:
    """A plan as `parallelize` takes it: also "auto", which leaves all to the search."""
    return Plan().with_search() if plan in SEARCHES else Plan.of(plan)


def _aim(
    plan: object,
    machine: str | os.PathLike[str] | None,
    memory: int | None,
    optimize: Goal,
    calls: tuple[float, ...],
    searches: bool,
    collectives: Collectives = "nccl",
) -> Aim:
    described = read_machine(machine).using(collectives)
    is_limited = memory is not None or machine is not None or searches
    limit = described.usable_memory if memory is None else memory
    return Aim(described, limit if is_limited else None, plan == "auto:free", optimize, calls)


def read_calls(weights: Mapping[str, float] | None, names: Collection[str]) -> tuple[float, ...]:
    """How often each program is called, in order; nothing where all count the same.

    Raises:
        PlanError: other names than the programs', or no positive numbers.
    """
    if weights is None:
        return ()
    if {*weights} != {*names} or not all(0 < weight < math.inf for weight in weights.values()):
        known = ", ".join(filter(None, names)) or "one"
        raise PlanError(
            f"{option('--calls', 'weights')} are {dict(weights)}, and the programs are {known}",
            help=f"give each of several programs a number above 0: {option('prefill=1,decode=256', WEIGHTS)}",
        )
    return tuple(float(weights[name]) for name in names)


def _named(programs: Programs) -> dict[str, ExportedProgram]:
    pairs = list(programs.items() if isinstance(programs, Mapping) else programs)
    names = [pair[0] if isinstance(pair, tuple) and len(pair) == 2 else pair for pair in pairs]
    said = [name if isinstance(name, str) else type(name).__name__ for name in names]
    if not names or said != names or len(set(said)) < len(said) or not all(name.isidentifier() for name in said):
        raise ProgramError(
            f"several programs need a name each, got {said}",
            help='give {"prefill": exported_program, "decode": exported_program}',
        )
    return dict(pairs)


def _of(given: Given, name: str) -> Given:
    """What is given for one of several programs."""
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise PlanError(
            f"placements {given!r} do not say of which program they are", help="write {program's name: {...}}"
        )
    found: Given = given.get(name)
    return found


def tensor_parallel_transformation(
    exported_program: ExportedProgram,
    rank: int,
    world_size: int,
    device_type: str,
    parallel_strategies: Mapping[str, ParallelStyle | type[ParallelStyle] | str],
) -> ExportedProgram:
    """The program of one rank: a drop-in for `torch.distributed.tensor.experimental._tp_transform`.

    Inside an initialised process group of `world_size` ranks the program uses that group by its own name; without one
    it uses the logical name of a mesh `tp=<world_size>`, which `tpcompiler.load` registers.

    Args:
        device_type: "cpu" or "cuda". The rank's weights are put there, on the current device, where there is one.
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
    made = parallelize(exported_program, mesh, dict(parallel_strategies), device_type=device_type).rank_program(rank)
    if device_type != "cuda" or torch.cuda.is_available():
        place_state(made, device_type)
    return made


def check(
    directory: str | os.PathLike[str],
    original: ExportedProgram | None = None,
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    trust: bool = False,
) -> CheckReport:
    """Check the files of an artifact against what they claim, without running the model (`docs/trust.md`).

    Each rank's program must be a sound share of one and the same single-device program, all ranks must issue the same
    collectives, and the tensors must be what the manifest says. Whether that program is the user's is for
    `ParallelProgram.verify`, or `tpcompiler verify`, to say.

    Args:
        directory: what `ParallelProgram.save`, `ProgramSet.save` or `tpcompiler convert` wrote.
        original: the single-device program, whose weights are compared with the ranks' shares.
        checkpoint: a directory of safetensors files with the weights of a model that was exported without; of the
            model in the artifact by default.
        trust: read files too that need a pickle or could run code (docs/security.md).

    Raises:
        ArtifactError: no artifact, a damaged one, or, without `trust`, one whose files could run code.
    """
    if checkpoint is not None:
        original = original or read_original(directory, read_manifest(directory), trust=trust)
        original = with_weights(original, directory, checkpoint, trust=trust)
    plain = original and with_plain_weights(original)
    return check_artifact(directory, original=plain, prepare=on_cpu, canonical=canonicalize, trust=trust)


def check_budget(
    made: ParallelProgram | ProgramSet | str | os.PathLike[str],
    limits: Sequence[str] = (),
    *,
    max_wire_bytes: int | None = None,
    max_memory: int | str | None = None,
) -> None:
    """Hold a conversion, or an artifact, to what it may send and hold.

    Args:
        made: what `parallelize` gives, or the directory of an artifact; of several programs each is held to all of it.
        limits: such as "2 all_reduce/layer" (in each repeated module), "1 all_gather" (in all) or "0 fallbacks".
        max_wire_bytes: that a rank sends in one call.
        max_memory: bytes (or "24GB") of parameters, buffers and constants that a rank holds. Unlike `memory=` of
            `parallelize` it is no limit of the search, and leaves activations out, which are estimated.

    Raises:
        BudgetError: it does more: what, where, and by how much; or a limit in no known form.
        ArtifactError: no artifact, or a damaged one.
    """
    budget = Budget.read(limits, max_wire_bytes, max_memory)
    if isinstance(made, ParallelProgram):
        manifests = {"": made.manifest()}
    elif isinstance(made, ProgramSet):
        manifests = {name: program.manifest() for name, program in made.items()}
    else:
        manifests = {name: read_manifest(Path(made) / name) for name in programs_in(made) or [""]}
    for name, manifest in manifests.items():
        budget.check(manifest, name or "the program")


def _specs(given: Given, what: str) -> dict[str, PlacementSpec] | list[PlacementSpec | None] | None:
    if given is None:
        return None
    if isinstance(given, Mapping):
        return {name: _spec(spec, what) for name, spec in given.items() if spec is not None}
    if isinstance(given, str | Placement) or not isinstance(given, Sequence):
        raise PlanError(
            f"{what}s={given!r} is neither a mapping nor a list",
            help='write {name: placement} or [placement, ...], such as ["S(0)"]',
        )
    return [None if spec is None else _spec(spec, what) for spec in given]


def _spec(spec: Any, what: str) -> PlacementSpec:
    if isinstance(spec, Mapping):
        return {axis: _placement(placement, what) for axis, placement in spec.items()}
    return _placement(spec, what)


def _placement(placement: Any, what: str) -> Placement:
    if isinstance(placement, Placement):
        return placement
    try:
        return parse_placement(placement if isinstance(placement, str) else repr(placement))
    except PlanError as error:
        raise PlanError(error.message, help=error.help, asked_by=option(f"--{what}", f"{what}s=")) from None
