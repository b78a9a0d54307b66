"""Run and compare the ranks' programs in files with the model that they were made from."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from msgspec import structs
from torch.export import ExportedProgram

from tpcompiler.checkpoint.cut import read_shares
from tpcompiler.checkpoint.fill import read_original, with_weights
from tpcompiler.checkpoint.ranks import RankShares
from tpcompiler.errors import ArtifactError, InputsError, option
from tpcompiler.frontend.plain_weights import with_plain_weights
from tpcompiler.ir import edit
from tpcompiler.ir.mesh import Mesh, groups_named
from tpcompiler.ir.program import CanonicalProgram
from tpcompiler.ir.shares import row_sharding
from tpcompiler.judge.compare.compare import Call, VerifyReport, compare_calls, read_call
from tpcompiler.judge.compare.judge import Layout
from tpcompiler.judge.compare.processes import LONGEST, answers_of_ranks
from tpcompiler.judge.compare.subject import Run, Subject, shares_of
from tpcompiler.judge.sound.boundary import compare_calling
from tpcompiler.judge.sound.check import read_proved_model
from tpcompiler.judge.sound.unsound import Unsound
from tpcompiler.parallel.compared import compared_calls, on_cpu
from tpcompiler.passes.canonicalize import canonicalize
from tpcompiler.runtime.artifact import MODEL, Manifest, programs_in, read_manifest
from tpcompiler.runtime.package import read_package
from tpcompiler.runtime.rank_file import put_state, read_rank, taken_by
from tpcompiler.runtime.records import TensorRecord
from tpcompiler.runtime.weightless import weightless_names
from tpcompiler.runtime.weights import laid_out

OWN = "the weights are the ranks' own: whether they are the model's, --checkpoint or --against would show"


def verify_artifact(
    directory: str | os.PathLike[str],
    original: ExportedProgram,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    then: Sequence[Call] = (),
    checkpoint: str | os.PathLike[str] | None = None,
    trust: bool = False,
) -> VerifyReport:
    """Verify the files of an artifact: run all ranks and the original in this process, and compare them.

    Mapped weights (the shared layout, a checkpoint) are read layer by layer, and not kept in memory.

    Args:
        original: the program that was converted. One that was exported without weights uses the checkpoint's or,
            without one, the ranks' own, which are then not verified.
        checkpoint: a directory of safetensors files; ranks whose weights are not cut yet read theirs from it, too.
        then: args, or (args, kwargs), of further calls, each on the buffers that earlier calls have written.
        trust: also read files that need a pickle or could run code (docs/security.md).

    Raises:
        ArtifactError: the artifact is missing, damaged, made from another program or, without `trust`, its files
            could run code.
        InputsError: the program rejects the arguments.
    """
    manifest = read_manifest(directory)
    original = with_plain_weights(original)
    own = bool(weightless_names(original)) and checkpoint is None
    subject = _subject_of(directory, manifest, original, checkpoint, trust)
    report = compared_calls({"": subject}, [("", args, kwargs or {}), *(("", *read_call(call)) for call in then)])
    if report.ok and MODEL in manifest.files:  # an artifact for other ranks would be made from it
        read_proved_model(directory, manifest, prepare=on_cpu, canonical=canonicalize, trust=trust)
    return structs.replace(report, note=OWN if not report.note else f"{report.note}; {OWN}") if own else report


def verify_package(
    directory: str | os.PathLike[str],
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    trust: bool = False,
    timeout: timedelta = LONGEST,
) -> VerifyReport:
    """Compare an artifact's package with the model, both on the example inputs that the model was exported with.

    All ranks run the package in separate processes, started here; several programs are called once each, in
    order, on the buffers (a cache) that earlier ones have written. The model is the artifact's own, with the
    weights of the checkpoint or, without one, the ranks'.

    Args:
        checkpoint: a directory of safetensors files; ranks whose weights are not cut yet read theirs from it, too.
        trust: also read files that need a pickle or could run code (docs/security.md). The package is run in any case.
        timeout: limit for all calls, including the start of the ranks.

    Raises:
        ArtifactError: the package is missing, damaged or for another machine, or there are no weights for it.
        InputsError: the model was saved without example inputs.
        LaunchError: a rank fails, or does not end in time.
    """
    names = programs_in(directory) or [""]
    subjects, calls = {}, []
    for name in names:
        folder = Path(directory) / name
        manifest = read_manifest(folder)
        original = read_original(folder, manifest, trust=trust)
        if original.example_inputs is None:
            raise InputsError(
                f"{folder} was saved without example inputs",
                help=f"package it with {option('--no-check', 'check=False')}",
            )
        subjects[name] = _subject_of(folder, manifest, original, checkpoint, trust)
        calls.append((name, *original.example_inputs))
    shares = [(name, shares_of(subjects[name], args, kwargs)) for name, args, kwargs in calls]
    package = read_package(directory)
    threads = package.threads if package else 1
    answers = iter(answers_of_ranks(directory, shares, checkpoint, trust, threads, timeout))
    run: Run = lambda _: next(answers)  # noqa: E731  (called in the order of the calls)
    return compare_calls({name: replace(each, run=run) for name, each in subjects.items()}, calls)


def _subject_of(
    directory: str | os.PathLike[str],
    manifest: Manifest,
    original: ExportedProgram,
    checkpoint: str | os.PathLike[str] | None,
    trust: bool,
) -> Subject:
    """Return the ranks' programs in an artifact and the program they were made from, for a comparison.

    Raises:
        ArtifactError: as `verify_artifact`.
    """
    original = with_weights(original, directory, checkpoint, trust=trust)
    mesh = Mesh.of(manifest.mesh)
    canonical = canonicalize(original)
    rows = dict(manifest.placed())
    has = _boundary_and_leaves(canonical)
    wrote = {name: row.shape if isinstance(row, TensorRecord) else None for name, row in rows.items()}
    if differ := [name for name in (*wrote, *has) if name not in has or name not in wrote or has[name] != wrote[name]]:
        raise ArtifactError(
            f"{os.fspath(directory)} was made from another program: the two differ in {differ[0]!r}",
            help="give the program that it was converted from",
        )
    weights = functools.partial(read_shares, checkpoint) if checkpoint is not None else None
    programs = [
        read_rank(directory, manifest, rank, trust=trust, weights=weights) for rank in range(manifest.world_size)
    ]
    for rank, program in enumerate(programs):
        _put_from_beside(program, manifest, directory, rank, trust)
    used = {
        str(node.args[-1]) for program in programs for node in edit.calls(program.graph) if edit.is_collective(node)
    }
    for name in sorted(used):
        # All ranks run here in groups derived from the names; `load` makes them from the manifest.
        if sorted(manifest.groups.get(name, ())) != sorted(map(list, groups_named(name) or ())):
            raise ArtifactError(
                f"{os.fspath(directory)}: the manifest's ranks of the group {name!r} are not those of its name",
                help="convert the model again",
            )
    for rank, program in enumerate(programs):
        try:
            compare_calling(program, original)
        except Unsound as error:
            raise ArtifactError(
                f"{os.fspath(directory)} is called in another way than the program: on rank {rank} {error.text}",
                help="give the program that it was converted from, or convert it again",
            ) from error
    shardings = {name: row_sharding(row, mesh) for name, row in rows.items()}
    return Subject(
        original,
        programs,
        Layout(mesh, shardings),
        [row.name for row in manifest.inputs],
        canonical.output_names(),
        canonical.source,
        indices=manifest.inputs,
    )


def _put_from_beside(
    program: ExportedProgram, manifest: Manifest, directory: str | os.PathLike[str], rank: int, trust: bool
) -> None:
    """Give a rank's program the weights that another program's files store."""
    if elsewhere := [row for row in manifest.tensors if row.stored_in is not None]:
        source, taken = RankShares(directory, trust=trust), taken_by(program)
        first = {row.name: row.holder for row in elsewhere}
        held = {name: laid_out(source.share(name, rank), taken[name]) for name in set(first.values())}
        put_state(program, {name: held[first[name]] for name in first})


def _boundary_and_leaves(program: CanonicalProgram) -> dict[str, list[int] | None]:
    """Return the names in a manifest of this program, with the shapes of leaves (symbols may be renamed there)."""
    names = program.output_names()
    values = list(program.output.args[0])  # type: ignore[arg-type]
    user = zip(names, values[len(values) - len(names) :], strict=True)
    return {
        **{fqn: list(program.state(fqn).shape) for _, fqn in program.leaves()},
        **{node.name: None for node in program.user_inputs()},
        **{f"output {name}": None for name, value in user if edit.is_tensor(value)},
    }
