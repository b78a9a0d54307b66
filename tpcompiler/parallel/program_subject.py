"""Compare runs of an artifact's programs with the single device's."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

from msgspec import structs
from torch.export import ExportedProgram

from tpcompiler.artifact.program import ArtifactProgram
from tpcompiler.checkpoint.cut import read_shares
from tpcompiler.checkpoint.leaves import placed_shardings
from tpcompiler.errors import ArtifactError
from tpcompiler.frontend.plain_weights import with_plain_weights
from tpcompiler.ir import edit
from tpcompiler.ir.devices import device_types
from tpcompiler.ir.mesh import groups_named
from tpcompiler.ir.program import Program
from tpcompiler.ir.symm_mem import expand_collectives
from tpcompiler.judge.compare.compare import Call, VerifyReport, compare_calls
from tpcompiler.judge.compare.judge import Layout
from tpcompiler.judge.compare.same_bits import compare_bits, one_a_process
from tpcompiler.judge.compare.subject import Subject
from tpcompiler.judge.sound.boundary import compare_calling
from tpcompiler.judge.sound.unsound import Unsound
from tpcompiler.parallel.converted_program import ConvertedProgram
from tpcompiler.passes.canonicalize import canonicalize
from tpcompiler.passes.move_device import move_device
from tpcompiler.runtime.place import place_state
from tpcompiler.runtime.records import TensorRecord


def on_cpu(program: ExportedProgram) -> ExportedProgram:
    """Return the program for a CPU, where its ops can be evaluated on any machine."""
    return expand_collectives(move_device(program, "cpu"))


def layout_of(program: ArtifactProgram) -> Layout:
    """Return the layout of tensors at the boundary."""
    return Layout(program.mesh, placed_shardings(program.manifest))


def compared_calls(
    subjects: Mapping[str, Subject],
    calls: Sequence[Call],
    same_bits: bool = False,
) -> VerifyReport:
    """Run `compare_calls` with the programs moved to the device of the originals' tensors.

    With `same_bits`, with sums that follow the tree, and then `compare_bits`.
    """
    notes, moved = [], {}
    for name, subject in subjects.items():
        there = next((kind for kind in device_types(subject.reference.graph) if kind != "cpu"), "cpu")
        programs = [expand_collectives(move_device(program, there)) for program in subject.programs]
        for program in programs:
            place_state(program, there)
        moved[name] = replace(subject, programs=programs)
        made_for = {kind for program in subject.programs for kind in device_types(program.graph)} - {there}
        if made_for:
            notes.append(f"run on {there}: the same graphs as those for {made_for.pop()}, with the device renamed")
    if same_bits:
        report = compare_calls({name: one_a_process(subject) for name, subject in moved.items()}, calls)
        found, does = compare_bits(moved, calls)
        notes = [*notes[:1], does]
        report = structs.replace(report, ok=report.ok and not found, outputs=[*report.outputs, *found])
    else:
        notes, report = notes[:1], compare_calls(moved, calls)
    return structs.replace(report, note="; ".join(filter(None, (*notes, report.note)))) if notes else report


def subject_of(
    program: ArtifactProgram,
    original: ExportedProgram | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
) -> Subject:
    """Return a program of an artifact and its single-device program, for a comparison.

    Args:
        original: the program that was converted; by default the artifact's own.
        checkpoint: a directory of safetensors files with weights that the original, or the ranks, lack.

    Raises:
        ArtifactError: the artifact was made from another program, a file is damaged, or there are no weights.
    """
    weights = functools.partial(read_shares, checkpoint) if checkpoint is not None else None
    is_own = original is None and isinstance(program, ConvertedProgram)
    reference = program.fill(program.original() if original is None else with_plain_weights(original), checkpoint)
    canonical: Program = program.resharded if is_own else canonicalize(reference)  # type: ignore[attr-defined]
    if not is_own:
        _refuse_other_model(program, canonical)
    ranks = [program.rank_program(rank, weights) for rank in range(program.world_size)]
    if not is_own:
        _refuse_other_calls(program, ranks, reference)
    manifest = program.manifest
    return Subject(
        reference,
        ranks,
        layout_of(program),
        [row.name for row in manifest.inputs],
        canonical.output_names(),
        canonical.source,
        indices=manifest.inputs,
        family=manifest.family,
    )


def _refuse_other_model(program: ArtifactProgram, canonical: Program) -> None:
    """Raise ArtifactError if a program has other inputs, outputs or weights than the artifact's."""
    placed = dict(program.manifest.placed())
    wrote = {name: row.shape if isinstance(row, TensorRecord) else None for name, row in placed.items()}
    has = _boundary_and_leaves(canonical)
    if differ := [name for name in (*wrote, *has) if name not in has or name not in wrote or has[name] != wrote[name]]:
        raise ArtifactError(
            f"{program.title} was made from another program: the two differ in {differ[0]!r}",
            help="give the program that it was converted from",
        )


def _refuse_other_calls(program: ArtifactProgram, ranks: Sequence[ExportedProgram], reference: ExportedProgram) -> None:
    """Raise ArtifactError if groups are not those of their names, or ranks are called unlike the single device."""
    groups = program.manifest.groups
    used = {str(node.args[-1]) for each in ranks for node in edit.calls(each.graph) if edit.is_collective(node)}
    for name in sorted(used):
        # All ranks run here in groups derived from the names; `load` makes them from the manifest.
        if sorted(groups.get(name, ())) != sorted(map(list, groups_named(name) or ())):
            raise ArtifactError(
                f"{program.title}: the manifest's ranks of the group {name!r} are not those of its name",
                help="convert the model again",
            )
    for rank, each in enumerate(ranks):
        try:
            compare_calling(each, reference)
        except Unsound as error:
            raise ArtifactError(
                f"{program.title} is called in another way than the program: on rank {rank} {error.text}",
                help="give the program that it was converted from, or convert it again",
            ) from error


def _boundary_and_leaves(program: Program) -> dict[str, list[int] | None]:
    """Return the names in a manifest of this program, with the shapes of leaves (symbols may be renamed there)."""
    names = program.output_names()
    values = list(program.output.args[0])  # type: ignore[arg-type]
    user = zip(names, values[len(values) - len(names) :], strict=True)
    return {
        **{fqn: list(program.state(fqn).shape) for _, fqn in program.leaves()},
        **{node.name: None for node in program.user_inputs()},
        **{f"output {name}": None for name, value in user if edit.is_tensor(value)},
    }
