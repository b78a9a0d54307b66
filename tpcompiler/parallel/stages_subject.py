"""Compare the stages of a program with the whole, on all ranks of all stages."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram

from tpcompiler._torch import LEAF_KINDS, all_tensors, user_inputs, with_state
from tpcompiler.artifact.program import ArtifactProgram, stages_by_whole
from tpcompiler.artifact.stored import StoredProgram
from tpcompiler.checkpoint.fill import computed_values, fill_weights
from tpcompiler.checkpoint.leaves import placed_shardings
from tpcompiler.checkpoint.ranks import RankShares, open_source
from tpcompiler.errors import ArtifactError
from tpcompiler.frontend.plain_weights import with_plain_weights
from tpcompiler.ir import edit
from tpcompiler.ir.sharding import Sharding
from tpcompiler.judge.compare.judge import Layout
from tpcompiler.judge.compare.simulate import RankResult, simulate
from tpcompiler.judge.compare.subject import Subject
from tpcompiler.parallel.program_subject import subject_of
from tpcompiler.passes.canonicalize import canonicalize
from tpcompiler.runtime.place import memory_of
from tpcompiler.runtime.weightless import weightless_names

Held = dict[int, list[dict[str, torch.Tensor]]]


def subject_of_stages(
    stages: Sequence[ArtifactProgram],
    original: ExportedProgram | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    held: Held | None = None,
) -> Subject:
    """Return the whole program and all ranks of all stages, for a comparison.

    Args:
        stages: in order.
        held: what ranks have written to their buffers, by stage; programs of one family share it.
        original: the whole program; by default the artifact's.
        checkpoint: a directory of safetensors files with weights that the whole, or the ranks, lack.

    Raises:
        ArtifactError: as `subject_of`.
    """
    each = [subject_of(program, program.original(), checkpoint) for program in stages]
    whole = _filled(stages, original or whole_of(stages), checkpoint)
    canonical = canonicalize(whole)
    record = stages[0].manifest.stage
    assert record is not None
    ranks = len(each[0].programs)
    held = {} if held is None else held

    receives = [program.manifest.stage.receives for program in stages if program.manifest.stage is not None]

    def run(shares: Sequence[Sequence[Any]]) -> list[RankResult]:
        values = [dict(zip(record.arguments, share, strict=True)) for share in shares]
        made: list[dict[str, Any]] = [{} for _ in range(ranks)]
        written: list[dict[str, torch.Tensor]] = [{} for _ in range(ranks)]
        for stage, subject in enumerate(each):
            state = held.setdefault(stage, [{} for _ in range(ranks)])
            given = [
                [(own if spec.arg.name in receives[stage] else taken)[spec.arg.name] for spec in user_inputs(program)]
                for own, taken, program in zip(made, values, subject.programs, strict=True)
            ]
            for rank, result in enumerate(simulate(subject.programs, given, state=state)):
                made[rank] |= dict(zip(subject.output_names, result.outputs, strict=True))
                written[rank] |= result.mutated
                state[rank].update(result.mutated)
        results = [{**record.constants, **own} for own in made]
        return [RankResult([own[name] for name in record.returns], written[rank]) for rank, own in enumerate(results)]

    shardings = {node.name: Sharding.replicated(edit.fake(node).ndim) for node in canonical.user_inputs()}  # if unused
    shardings |= {name: sharding for program in stages for name, sharding in placed_shardings(program.manifest).items()}
    indices = [row for program in stages for row in program.manifest.inputs if row.name in record.inputs]
    return Subject(
        whole,
        [whole] * ranks,
        Layout(stages[0].mesh, shardings),
        record.inputs,
        canonical.output_names(),
        run=run,
        indices=indices,
        family=stages[0].manifest.family,
    )


def originals_of(programs: Mapping[str, ArtifactProgram], original: ExportedProgram) -> dict[str, ExportedProgram]:
    """Return the single-device program of each program; for a stage, its part with the original's tensors.

    An original with other tensors than the program that was cut has no such parts.
    """
    found = dict.fromkeys(programs, original)
    for stages in stages_by_whole(programs).values():
        plain, whole = with_plain_weights(original), stages[0].whole_program()
        if whole is None or _leaves_of(plain) == _leaves_of(whole):
            found |= {each.name: _with_tensors(each.original(), all_tensors(plain)) for each in stages}
    return found


def _leaves_of(program: ExportedProgram) -> set[str | None]:
    return {spec.target for spec in program.graph_signature.input_specs if spec.kind in LEAF_KINDS}


def _with_tensors(program: ExportedProgram, tensors: Mapping[str, Any]) -> ExportedProgram:
    held = (program.state_dict, program.constants)
    state, constants = ({name: tensors[name] for name in own if name in tensors} for own in held)
    return with_state(program, state, constants, program.module_call_graph, program.example_inputs)


def whole_of(stages: Sequence[ArtifactProgram]) -> ExportedProgram:
    """Return the program that was cut into stages, from memory or from the files of the first.

    Raises:
        ArtifactError: it is missing or damaged.
    """
    whole = stages[0].whole_program()
    if whole is None:
        raise ArtifactError(
            f"{stages[0].title} lacks the program that was cut into stages", help="convert the model again"
        )
    return whole


def _filled(
    stages: Sequence[ArtifactProgram], whole: ExportedProgram, checkpoint: str | os.PathLike[str] | None
) -> ExportedProgram:
    lacking = weightless_names(whole)
    files = [each.files for each in stages if isinstance(each, StoredProgram)]
    if not lacking or (checkpoint is None and not files):
        return whole
    source = open_source(checkpoint) if checkpoint is not None else RankShares(*files)
    state, constants = dict(whole.state_dict), dict(whole.constants)
    specs = {spec.arg.name: spec.target for spec in whole.graph_signature.input_specs}
    parameters = {*whole.graph_signature.parameters}
    used = {specs[node.name] for node in whole.graph.find_nodes(op="placeholder") if node.users}
    known = {name: value for own in files for name, value in computed_values(whole, own).items()} if checkpoint else {}
    for name, value in known.items():  # no checkpoint contains computed values, such as rotary frequencies
        (state if name in state else constants)[name] = value
    tensors = {**state, **constants}
    memory = {memory_of(tensors[name]) for name in used if name in tensors}  # of a tied weight under any name
    for name in lacking - used - known.keys():  # no stage has them
        if memory_of(tensors[name]) in memory:
            continue
        own = state if name in state else constants
        zeros = torch.zeros(own[name].shape, dtype=own[name].dtype)
        own[name] = torch.nn.Parameter(zeros, zeros.is_floating_point()) if name in parameters else zeros
    filled = with_state(whole, state, constants, whole.module_call_graph, whole.example_inputs)
    fill_weights(filled, source, partial=True)
    return filled
