"""The public functions that convert programs and search for plans."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.distributed.tensor.parallel import ParallelStyle
from torch.export import ExportedProgram

import tpcompiler.rules  # noqa: F401  (registers the rules)
from tpcompiler.api.parallel_program import ParallelProgram
from tpcompiler.api.request import AUTO, Given, PlanLike, Programs, Request, read_plan
from tpcompiler.errors import MeshError
from tpcompiler.ir.gc_pause import collector_rests
from tpcompiler.ir.mesh import Mesh, MeshLike
from tpcompiler.parallel.converted_program import ConvertedProgram, convert_programs
from tpcompiler.parallel.cut_batch import cut_batch
from tpcompiler.parallel.pipeline import find_placements
from tpcompiler.passes.apply_plan import names_of
from tpcompiler.plan.plan import Plan, join_plans
from tpcompiler.runtime.artifact import families
from tpcompiler.runtime.place import place_state
from tpcompiler.runtime.records import Collectives, Goal, Optimizer


@collector_rests()
def parallelize(
    exported_program: ExportedProgram | Programs,
    mesh: MeshLike,
    plan: PlanLike = AUTO,
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
    request = Request(**locals())  # its fields are these arguments
    conversions, made = request.conversions(), dict[str, ConvertedProgram]()
    for family in families(conversions, lambda own: own.family):
        made |= convert_programs(cut_batch(family))[1]
    return ParallelProgram({name: made[name] for name in conversions})


@collector_rests()
def find_plan(
    exported_program: ExportedProgram | Programs,
    mesh: MeshLike,
    plan: PlanLike = AUTO,
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
    request = Request(**{**locals(), "plan": read_plan(plan).with_search()})
    plans = []
    for family in families(request.conversions(), lambda own: own.family):
        cut = cut_batch(family)
        found = find_placements([*cut.values()])
        formed = [own.with_styles(*found.forms) for own in cut.values()]
        names = [name for own in formed for name in names_of(own.program)]
        plans.append(join_plans([own.plan for own in formed]).completed(found.styles, names))
    return join_plans(plans)


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
