"""Compare an artifact's programs, or its package, with the model."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from msgspec import structs
from torch.export import ExportedProgram

from tpcompiler.artifact.program import ArtifactProgram, find_state_apart, stages_by_whole
from tpcompiler.artifact.stored import StoredProgram
from tpcompiler.checkpoint.hosted import hosts_of
from tpcompiler.checkpoint.load import DEGREES
from tpcompiler.errors import ArtifactError, InputsError, UnsupportedError, option
from tpcompiler.judge.compare.compare import Call, VerifyReport, compare_calls, read_call
from tpcompiler.judge.compare.processes import answers_of_ranks
from tpcompiler.judge.compare.same_bits import join_shares_of, split_results
from tpcompiler.judge.compare.simulate import RankResult
from tpcompiler.judge.compare.subject import Run, Subject, shares_of
from tpcompiler.judge.sound.check import read_proved_model
from tpcompiler.parallel.program_subject import compared_calls, on_cpu, subject_of
from tpcompiler.parallel.stages_subject import Held, subject_of_stages
from tpcompiler.passes.canonicalize import canonicalize
from tpcompiler.runtime.artifact import MODEL, SINGLE, is_single
from tpcompiler.runtime.package import read_package
from tpcompiler.runtime.program_files import ProgramFiles
from tpcompiler.runtime.weightless import weightless_names

OWN = "the weights are the ranks' own: whether they are the model's, --checkpoint or --against would show"


def verify_programs(
    programs: Mapping[str, ArtifactProgram],
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any],
    then: Sequence[Any],
    original: ExportedProgram | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    same_bits: bool = False,
) -> VerifyReport:
    """Run all ranks of an artifact's programs and compare them with the model (`ParallelProgram.verify`).

    Raises:
        ArtifactError: a file is damaged, or was made from another program.
        InputsError: a program rejects the arguments, or no program has the name.
        UnsupportedError: `same_bits` of stages, or of what cannot be hosted.
    """
    if apart := find_state_apart(programs):
        raise ArtifactError(apart, help="convert the programs again, over the same ranks")
    staged = stages_by_whole(programs)
    if same_bits and staged:
        raise UnsupportedError("stages cannot be run with same_bits yet", help="leave same_bits out")
    if same_bits and len({program.mesh for program in programs.values()}) > 1:
        raise UnsupportedError(DEGREES, help="leave same_bits out, or convert all for one mesh")
    alone = len(programs) == 1
    own, subjects = False, dict[str, Subject]()
    held: dict[str | None, Held] = {}
    for whole, stages in staged.items():
        state = held.setdefault(stages[0].manifest.family, {})
        subjects[whole] = subject_of_stages(stages, original, checkpoint, state)
    for name, program in programs.items():
        if program.manifest.stage is not None:
            continue
        model = original if original is not None or not program.manifest.files else program.original()
        own |= model is not None and checkpoint is None and bool(weightless_names(model))
        subjects[SINGLE if alone else name] = subject_of(program, model, checkpoint)
    report = compared_calls(subjects, _read_calls(subjects, args, kwargs, then), same_bits)
    for program in programs.values():
        if (
            report.ok and not staged and MODEL in program.manifest.files
        ):  # an artifact for other ranks would be made from it
            read_proved_model(program, prepare=on_cpu, canonical=canonicalize)
    return structs.replace(report, note=OWN if not report.note else f"{report.note}; {OWN}") if own else report


def _read_calls(
    subjects: Mapping[str, Subject], args: Sequence[Any] | None, kwargs: Mapping[str, Any], then: Sequence[Any]
) -> list[Call]:
    if isinstance(args, torch.Tensor):
        raise InputsError(
            f"the inputs are one tensor of shape {list(args.shape)}, and not a sequence of inputs",
            help="pass a tuple: verify((x,))",
        )
    if args is None:
        return [(name, *examples_of(subject.reference, name, "give inputs")) for name, subject in subjects.items()]
    if is_single(subjects):
        return [(SINGLE, args, kwargs), *((SINGLE, *read_call(call)) for call in then)]
    calls = [(name, own, rest[0] if rest else {}) for name, own, *rest in args]
    for name, *_ in calls:
        if name not in subjects:
            raise InputsError(f"there is no program {name!r}", help=f"call one of {', '.join(subjects)}")
    return calls


def examples_of(program: ExportedProgram, title: str, help: str) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return the example inputs that a program was exported with.

    Raises:
        InputsError: it was saved without; `title` names it.
    """
    examples: tuple[Sequence[Any], Mapping[str, Any]] | None = program.example_inputs
    if examples is None:
        raise InputsError(f"{title} was saved without example inputs", help=help)
    return examples


def verify_package(
    files: Sequence[ProgramFiles],
    directory: Path,
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    processes: int = 0,
) -> VerifyReport:
    """Compare a package with the model, both on the example inputs, by all ranks in separate processes.

    Several programs are called once each, in order, on the buffers (a cache) that earlier ones have written.

    Args:
        processes: their number, if each runs several ranks.

    Raises:
        ArtifactError: the package is missing, damaged or for another machine, or there are no weights for it.
        InputsError: the model was saved without example inputs.
        LaunchError: a rank fails, or does not end in time.
    """
    subjects, calls = dict[str, Subject](), list[tuple[str, Sequence[Any], Mapping[str, Any]]]()
    without = f"package it with {option('--no-check', 'check=False')}"
    for each in files:
        program = StoredProgram(each)
        original = program.original()
        calls.append((each.name, *examples_of(original, program.title, without)))
        subjects[each.name] = subject_of(program, original, checkpoint)
    shares = [(name, shares_of(subjects[name], args, kwargs)) for name, args, kwargs in calls]
    manifests = {each.name: each.manifest for each in files}
    hosts = {name: hosts_of(each, processes) for name, each in manifests.items() if processes}
    given = [(name, join_shares_of(subjects[name], hosts[name], own) if hosts else own) for name, own in shares]
    package = read_package(directory)
    threads = package.threads if package else 1
    answers = iter(answers_of_ranks(directory, given, checkpoint, files[0].trust, threads, bool(hosts)))

    def run_on(name: str) -> Run:
        def run(_: Any) -> Sequence[RankResult]:  # called in the order of the calls
            results = next(answers)
            return split_results(subjects[name], manifests[name], hosts[name], results) if hosts else results

        return run

    return compare_calls({name: replace(each, run=run_on(name)) for name, each in subjects.items()}, calls)
