"""Several programs of one model with one set of weights: prefill and decode share parameters and caches."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tpcompiler.artifact.writing import Files, writer_of
from tpcompiler.errors import InputsError
from tpcompiler.judge.compare.compare import VerifyReport
from tpcompiler.parallel.compared import compared_calls
from tpcompiler.parallel.parallel_program import ParallelProgram
from tpcompiler.runtime.artifact import write_set
from tpcompiler.terminal.tables import Part, Report, Shown

Call = tuple[str, Sequence[Any]] | tuple[str, Sequence[Any], Mapping[str, Any]]


class ProgramSet(Shown, Mapping[str, ParallelProgram]):
    """Programs by name, made by `tpcompiler.parallelize`; a leaf of several programs has one placement."""

    def __init__(self, programs: Mapping[str, ParallelProgram]) -> None:
        self._programs = dict(programs)

    def __getitem__(self, name: str) -> ParallelProgram:
        return self._programs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._programs)

    def __len__(self) -> int:
        return len(self._programs)

    def __repr__(self) -> str:
        return f"ProgramSet({', '.join(f'{name}: {program!r}' for name, program in self.items())})"

    def report(self) -> Report:
        """Return the reports of all programs, each under its name."""
        return Report("\n\n".join(f"{name}\n{program.report()}" for name, program in self.items()))

    def parts(self) -> Iterator[Part]:
        for name, program in self.items():
            yield from (name, *program.parts())

    def verify(self, calls: Sequence[Call]) -> VerifyReport:
        """Run all ranks through these calls, (name, args) or (name, args, kwargs), and compare as for one program.

        Each call uses the buffers (a cache) that earlier calls have written, in any program.

        Raises:
            InputsError: no program has the name, or the program rejects the arguments.
        """
        for name, *_ in calls:
            if name not in self:
                raise InputsError(f"there is no program {name!r}", help=f"call one of {', '.join(self)}")
        subjects = {name: program.subject() for name, program in self.items()}
        return compared_calls(subjects, [(name, args, rest[0] if rest else {}) for name, args, *rest in calls])

    def save(
        self,
        directory: str | os.PathLike[str],
        *,
        force: bool = False,
        keep_output_types: bool = False,
        layout: Files | None = None,
    ) -> None:
        """Write one directory for `tpcompiler.load`, all or nothing: an artifact for each program, weights once.

        Tensors in an earlier program's files are left out of later ones: a rank loads them once, for all. `layout`: as
        in `ParallelProgram.save`.

        Raises:
            ArtifactError: the directory exists (without `force`), or cannot be written.
            UnsupportedError, ProgramError: as `ParallelProgram.save`.
        """
        stored: dict[str, str] = {}
        writers = {}
        for name, program in self.items():
            leaves = {fqn for _, fqn in program.resharded.leaves()}
            elsewhere = {fqn: stored[fqn] for fqn in leaves & stored.keys()}
            stored.update(dict.fromkeys(leaves - stored.keys(), name))
            writers[name] = writer_of(program, keep_output_types=keep_output_types, elsewhere=elsewhere, layout=layout)

        def inspect(written: Path) -> None:
            for name, program in self.items():
                program.inspect(written / name)

        write_set(directory, writers, force=force, inspect=inspect)
