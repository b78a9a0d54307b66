"""Programs cut into the stages of a pipeline, and what each stage says of the whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import fx
from torch.export import ExportedProgram

from tpcompiler._torch import TreeSpec, treespec_dumps, user_inputs
from tpcompiler.cost.machine import Machine
from tpcompiler.cost.timeline import predict_times
from tpcompiler.errors import MeshError, UnsupportedError
from tpcompiler.frontend.plain_weights import with_plain_weights
from tpcompiler.frontend.stages import Prices, cut_stages
from tpcompiler.ir.calling_convention import plain_outputs
from tpcompiler.ir.local import no_new_guards
from tpcompiler.ir.mesh import PIPELINE, Mesh
from tpcompiler.ir.program import CanonicalProgram, results_of
from tpcompiler.parallel.batches import find_batches
from tpcompiler.passes.canonicalize import canonicalize
from tpcompiler.runtime.artifact import is_single
from tpcompiler.runtime.inputs import fixed_arguments
from tpcompiler.runtime.pipeline import is_plain
from tpcompiler.runtime.records import StageRecord


class StageProgram(NamedTuple):
    """A stage of a program, and the program that it is a stage of."""

    program: ExportedProgram
    record: StageRecord
    whole: ExportedProgram


def mesh_of_stage(mesh: Mesh) -> Mesh:
    """Return the mesh of the ranks of one stage.

    Raises:
        MeshError: the stages are not the first axis, or have shares: each takes what makes the slowest take least.
    """
    (first, _), *others = mesh.axes
    if first != PIPELINE:
        raise MeshError(f"the axis {PIPELINE!r} is not the first of the mesh {mesh}", help=f"write {PIPELINE}=2,tp=4")
    if mesh.is_unequal([PIPELINE]):
        raise MeshError(f"the stages of {mesh} have unequal shares", help="give their number, pp=2, and shares to tp")
    return mesh.along(axis for axis, _ in others) if others else Mesh.of({"tp": 1})


def stage_programs(
    programs: Mapping[str, ExportedProgram],
    mesh: Mesh,
    machine: Machine,
    limit: int | None,
    calls: Mapping[str, float],
) -> dict[str, StageProgram]:
    """Cut programs into stages, by name: `decode_0`, `decode_1`, or `stage_0` for a program without a name.

    Programs that share a cache, or most leaves, are cut alike: each leaf is in one stage of all.

    Args:
        limit: the most bytes that a rank may hold.
        calls: the number of calls of each program; all the same if empty.

    Raises:
        MeshError, UnsupportedError: as `cut_stages`.
    """
    count, ranks = mesh.degree(PIPELINE), mesh_of_stage(mesh).world_size
    canonical = {name: canonicalize(with_plain_weights(program)) for name, program in programs.items()}

    def seconds(graph: fx.Graph) -> dict[str, float]:
        steps = predict_times(graph, {}, machine, Mesh.of(1)).steps
        return {step.node: step.work / ranks + step.floor for step in steps}

    prices = Prices(seconds, machine.transfer_seconds, float("inf") if limit is None else float(limit * ranks))
    made = dict[str, StageProgram]()
    for group in _groups(canonical):
        with no_new_guards(*(program.graph for program in group.values())):
            batches = find_batches(group)
        for name, stages in cut_stages(group, count, prices, calls).items():
            whole, results = programs[name], results_of(canonical[name])
            for index, stage in enumerate(stages):
                record = StageRecord(
                    of=name,
                    index=index,
                    count=count,
                    receives=dict(stage.receives),
                    outputs=list(stage.outputs),
                    inputs=[node.name for node in canonical[name].user_inputs()],
                    arguments=[spec.arg.name for spec in user_inputs(canonical[name].source)],
                    fixed=fixed_arguments(canonical[name].source),
                    returns=list(results),
                    constants={key: value for key, value in results.items() if not isinstance(value, fx.Node)},
                    takes=_tree_text(name, whole.call_spec.in_spec),
                    makes=_tree_text(name, plain_outputs(whole.call_spec.out_spec)[0]),
                    batched_inputs=list(batches[name].inputs),
                    batched_outputs=list(batches[name].outputs),
                    obstacle=batches[name].obstacle,
                )
                prefix = "stage" if is_single(programs) else name
                made[f"{prefix}_{index}"] = StageProgram(stage.program, record, whole)
    return made


def _groups(programs: Mapping[str, CanonicalProgram]) -> list[dict[str, CanonicalProgram]]:
    """Return the programs that are cut alike: one writes what another takes (a cache), or they share most leaves.

    The embedding alone, which an encoder shares with its decoder, leaves each to be cut where it is best.
    """
    written = {target for program in programs.values() for _, target in program.mutations()}
    found: list[dict[str, set[str]]] = []  # the leaves that ops use, by program
    for name, program in programs.items():
        joined = {name: {fqn for node, fqn in program.leaves() if node.users}}
        own = joined[name]
        for group in [each for each in found if any(_are_cut_alike(own, other, written) for other in each.values())]:
            found.remove(group)
            joined = {**group, **joined}
        found.append(joined)
    return [{name: programs[name] for name in group} for group in found]


def _are_cut_alike(one: set[str], other: set[str], written: set[str]) -> bool:
    shared = one & other
    return bool(shared & written) or 2 * len(shared) > min(len(one), len(other))


def _tree_text(name: str, spec: TreeSpec) -> str:
    if not is_plain(spec):
        raise UnsupportedError(
            f"{name} takes or returns other classes than tuples, lists and dicts", help="pass and return tensors"
        )
    return treespec_dumps(spec)
