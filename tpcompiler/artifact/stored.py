"""A program of an artifact that is read from its files, each graph once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from tpcompiler._torch import all_tensors
from tpcompiler.artifact.program import ArtifactProgram, Stored
from tpcompiler.checkpoint.fill import with_weights
from tpcompiler.checkpoint.ranks import RankShares
from tpcompiler.errors import ArtifactError
from tpcompiler.ir.symm_mem import expand_collectives
from tpcompiler.runtime.artifact import MODEL, VALUES, WHOLE, Manifest, lacks_weights
from tpcompiler.runtime.program_files import ProgramFiles
from tpcompiler.runtime.rank_file import (
    Weights,
    put_state,
    read_graph,
    read_program,
    read_rank,
    read_state,
    taken_by,
)
from tpcompiler.runtime.records import Layout
from tpcompiler.runtime.weights import laid_out
from tpcompiler.terminal.progress import counted


class StoredProgram(ArtifactProgram):
    """A program in the files that `save` wrote. What is asked for is read, its hash compared, and nothing else."""

    def __init__(self, files: ProgramFiles) -> None:
        self.files = files
        self.name = files.name
        self.title = os.fspath(files.folder)

    @property
    def manifest(self) -> Manifest:
        return self.files.manifest

    def together(self) -> Sequence[ArtifactProgram]:
        return [self if files is self.files else StoredProgram(files) for files in self.files.together()]

    def beside(self) -> Mapping[str, Manifest]:
        return {name: files.manifest for name, files in self.files.beside.items()}

    def original(self) -> ExportedProgram:
        return read_program(self.files, MODEL)

    def whole_program(self) -> ExportedProgram | None:
        return read_program(self.files, WHOLE) if WHOLE in self.manifest.files else None

    def fill(self, original: ExportedProgram, checkpoint: str | os.PathLike[str] | None = None) -> ExportedProgram:
        return with_weights(original, self.files, checkpoint)

    def graph(self, rank: int) -> ExportedProgram:
        return read_graph(self.files, rank)

    def rank_program(self, rank: int, weights: Weights | None = None) -> ExportedProgram:
        program = read_rank(self.files, rank, weights)
        elsewhere = {row.name: row.holder for row in self.manifest.tensors if row.stored_in is not None}
        taken = taken_by(program) if elsewhere else {}
        held = {name: laid_out(self.share(name, rank), taken[name]) for name in {*elsewhere.values()}}
        put_state(program, {name: held[first] for name, first in elsewhere.items()})
        return program

    def shown(self, rank: int) -> ExportedProgram:
        return expand_collectives(read_rank(self.files, rank, _numbers_only))

    def classes(self) -> Sequence[Sequence[int]]:
        return list(self.manifest.programs.values())

    @cached_property
    def tensors(self) -> RankShares:
        """The tensors of all ranks, whose files' hashes are compared at the first use."""
        return RankShares(self.files)

    def share(self, name: str, rank: int) -> torch.Tensor:
        return self.tensors.share(name, rank)

    def read(self, name: str) -> torch.Tensor:
        return self.tensors.read(name)

    def writer(
        self, *, keep_output_types: bool = False, layout: Layout | None = None, elsewhere: Stored
    ) -> Callable[[Path], None]:
        stored = {row.name: row.stored_in for row in self.manifest.tensors if row.stored_in is not None}
        if layout not in (None, self.manifest.layout):
            raise ArtifactError(
                f"{self.title} has the layout {self.manifest.layout!r}, and its files are copied",
                help="leave the layout out, or convert the model again",
            )
        if lacking := stored.keys() - elsewhere.keys():
            raise ArtifactError(
                f"{self.title} leaves {len(lacking)} tensors to the program next to it, such as {min(lacking)!r}",
                help="save all programs of the artifact together",
            )
        return self.files.copy

    def ranks(self) -> Iterator[tuple[ExportedProgram, Mapping[str, Any]]]:
        """Yield every rank's program and tensors, after comparing hashes; ranks of one class share a program.

        Raises:
            ArtifactError: a file is missing, damaged, unreadable or, without trust, could run code.
        """
        files, manifest = self.files, self.manifest
        if VALUES in manifest.files:
            files.open(VALUES).close()
        programs: dict[int, tuple[ExportedProgram, Mapping[str, Any]]] = {}
        for ranks in counted(self.classes(), "reading programs", "programs"):
            program = read_graph(files, ranks[0])
            for rank in ranks:
                state = {} if lacks_weights(manifest) else read_state(files, rank, program)
                programs[rank] = program, {**all_tensors(program), **state}
        yield from (programs[rank] for rank in range(manifest.world_size))


def _numbers_only(
    manifest: Manifest, values: Mapping[str, torch.Tensor], rank: int, program: ExportedProgram
) -> dict[str, torch.Tensor]:
    return {name: torch.tensor([rows[rank]]) for name, rows in manifest.rank_numbers.items()}
