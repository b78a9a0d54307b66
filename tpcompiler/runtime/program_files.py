"""The files of an artifact's programs, whose hashes are compared when they are opened."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tpcompiler.errors import ArtifactError, option
from tpcompiler.runtime.artifact import (
    SINGLE,
    Manifest,
    inside,
    lacks_weights,
    open_known,
    program_file,
    programs_in,
    read_manifest,
    weights_file,
)
from tpcompiler.runtime.opened import Opened
from tpcompiler.runtime.target import MANIFEST


@dataclass(frozen=True)
class ProgramFiles:
    """The files of one of an artifact's programs, by its name.

    `trust`: also read files that need a pickle or could run code (docs/security.md).
    """

    name: str
    folder: Path
    manifest: Manifest
    trust: bool = False

    def open(self, name: str) -> Opened:
        """Open a file that the manifest names, after comparing its hash.

        Raises:
            ArtifactError: the file is missing, a link to elsewhere, or has other content.
        """
        return open_known(self.folder, self.manifest.files, name)

    def open_program(self, rank: int) -> Opened:
        """Open the file with a rank's program.

        Raises:
            ArtifactError: as `open`; the rank is outside the world.
        """
        self._refuse_outside(rank)
        return self.open(program_file(self.manifest, rank))

    def open_weights(self, rank: int) -> Opened:
        """Open the file with a rank's weights: with a program too, or without, in the shared layout.

        Raises:
            ArtifactError: as `open_program`; the weights are not cut yet.
        """
        self._refuse_outside(rank)
        if rank in lacks_weights(self.manifest):
            whole = (
                self.folder if self.manifest.stage is None else self.folder.parent
            )  # a stage has some of the weights
            raise ArtifactError(
                f"{self.folder} has no weights of rank {rank}: its model was exported without",
                help=f"cut them: tpcompiler cut {whole} --checkpoint DIR"
                + option("", ", or pass checkpoint=DIR to load"),
            )
        return self.open(weights_file(rank, self.manifest.layout))

    @cached_property
    def beside(self) -> dict[str, ProgramFiles]:
        """The other programs that store tensors of this one, by name.

        Raises:
            ArtifactError: as `read_manifest`; a link out of the directory.
        """
        names = sorted({row.stored_in for row in self.manifest.tensors if row.stored_in is not None})
        return {name: self._sibling(name, inside(self.folder.parent, name)) for name in names}

    def together(self) -> list[ProgramFiles]:
        """Return all programs of the artifact that share tensors with this one, in order, this one included.

        Raises:
            ArtifactError: as `read_manifest`.
        """
        path = self.folder.resolve()
        names = programs_in(path.parent) if path.parent != path else []
        if path.name not in names:
            return [self]
        each = [self if name == path.name else self._sibling(name, path.parent / name) for name in names]
        return [files for files in each if files.manifest.family == self.manifest.family]

    def reopened(self) -> ProgramFiles:
        """Read the manifest again.

        Raises:
            ArtifactError: as `read_manifest`.
        """
        return self._sibling(self.name, self.folder)

    def _sibling(self, name: str, folder: Path) -> ProgramFiles:
        return ProgramFiles(name, folder, read_manifest(folder), self.trust)

    def _refuse_outside(self, rank: int) -> None:
        if not 0 <= rank < self.manifest.world_size:
            raise ArtifactError(
                f"rank {rank} is outside the artifact's world of {self.manifest.world_size}",
                help=f"use a rank from 0 to {self.manifest.world_size - 1}",
            )

    def copy(self, folder: Path) -> None:
        """Copy the files into another folder, after comparing their hashes.

        Raises:
            ArtifactError: as `open`.
        """
        compiled = self.manifest.compiled.files if self.manifest.compiled else {}
        for files in (self.manifest.files, compiled):
            copy_files(self.folder, files, folder)
        shutil.copyfile(inside(self.folder, MANIFEST), folder / MANIFEST)


def copy_files(source: Path, files: dict[str, str], target: Path) -> None:
    """Copy files, by name with their SHA-256, from one folder to another.

    Raises:
        ArtifactError: as `open_known`.
    """
    for name in files:
        with open_known(source, files, name) as file, (target / name).open("wb") as copy:
            file.seek(0)
            shutil.copyfileobj(file, copy)


def open_program(directory: str | os.PathLike[str], *, trust: bool = False) -> ProgramFiles:
    """Open the artifact of a single program, or the folder of one of several.

    Raises:
        ArtifactError: as `read_manifest`.
    """
    return ProgramFiles(SINGLE, Path(directory), read_manifest(directory), trust)


def open_programs(directory: str | os.PathLike[str], *, trust: bool = False) -> dict[str, ProgramFiles]:
    """Open all programs of an artifact, by name; a single program is called `model`.

    Raises:
        ArtifactError: as `read_manifest`.
    """
    folder = Path(directory)
    if names := programs_in(folder):
        return {name: ProgramFiles(name, folder / name, read_manifest(folder / name), trust) for name in names}
    return {SINGLE: open_program(folder, trust=trust)}
