"""The whole tensors of an artifact, each joined from its ranks' shares when it is read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open

from tpcompiler.checkpoint.files import Checkpoint, state_of
from tpcompiler.checkpoint.leaves import leaves_of, shardings_of
from tpcompiler.errors import ArtifactError, explaining
from tpcompiler.ir.shares import join_first, mesh_of, refuse_unlike
from tpcompiler.runtime.program_files import ProgramFiles, open_programs
from tpcompiler.runtime.rank_file import map_weights
from tpcompiler.runtime.target import MANIFEST, SET
from tpcompiler.runtime.weights import TensorEntry


class Source(Protocol):
    """A source of whole tensors, one at a time: a `Checkpoint`, or an artifact's `RankShares`."""

    path: Path
    tensors: dict[str, TensorEntry]
    config: Mapping[str, Any]

    def read(self, name: str) -> torch.Tensor: ...

    def fingerprint(self) -> dict[str, list[int]]: ...


def open_source(path: str | os.PathLike[str] | Source) -> Source:
    """Open a checkpoint, or an artifact with weights; return a source that is already open.

    Raises:
        ArtifactError: the path is neither, or damaged.
    """
    if not isinstance(path, (str, os.PathLike)):
        return path
    is_artifact = any(os.path.isfile(Path(path) / name) for name in (MANIFEST, SET))
    return RankShares(*open_programs(path).values()) if is_artifact else Checkpoint(path)


class RankShares:
    """The whole tensors of programs with one set of weights, and of the programs that store some of their tensors.

    The files' hashes are compared once, here.

    Raises:
        ArtifactError: the artifact is missing, damaged, or without weights.
    """

    def __init__(self, *programs: ProgramFiles) -> None:
        folders = [each.folder for each in programs]
        self.path = folders[0] if len(folders) == 1 else folders[0].parent
        self.tensors: dict[str, TensorEntry] = {}
        self.config: Mapping[str, Any] = {}
        self._programs: dict[str, _Program] = {}
        known = {each.folder: each for each in programs}
        known |= {each.folder: each for own in programs for each in own.beside.values() if each.folder not in known}
        for files in known.values():
            program = _Program(files)
            for leaf in leaves_of(files.manifest):
                self._programs[leaf.name] = program
                self.tensors[leaf.name] = leaf

    def read(self, name: str) -> torch.Tensor:
        """Read a whole tensor; one that no axis cuts is mapped."""
        entry, program = self.tensors[name], self._programs[name]
        value = program.read(name, entry.shape)
        if value.dtype != entry.dtype:
            raise ArtifactError(
                f"{program.files[0].parent}: {name!r} is {value.dtype}, the manifest says {entry.dtype}",
                help="copy the artifact again",
            )
        return value

    def share(self, name: str, rank: int) -> torch.Tensor:
        """Map one rank's share of a tensor."""
        return self._programs[name].share(name, rank)

    def fingerprint(self) -> dict[str, list[int]]:
        """Return the size and times of every file, to detect a change."""
        files = {path for program in set(self._programs.values()) for path in program.files}
        return {str(file): state_of(file) for file in sorted(files)}


class _Program:
    """The files of one program's ranks."""

    def __init__(self, files: ProgramFiles) -> None:
        manifest = files.manifest
        self.mesh, self.shardings = mesh_of(manifest), shardings_of(manifest)
        self.files: list[Path] = []
        self.mapped: dict[int, dict[str, torch.Tensor]] = {}
        for rank in range(manifest.world_size):
            path, held = map_weights(files, rank)
            self.files.append(path)
            if manifest.layout == "ranks":
                self.mapped[rank] = held

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        sharding = self.shardings[name]
        problem = f"{self.files[0].parent}: {name!r} cannot be put together"
        with explaining(problem, "copy the artifact again", ValueError, LookupError):
            refuse_unlike(lambda rank: self.share(name, rank), sharding, self.mesh, shape)
            return join_first(lambda rank: self.share(name, rank), sharding, self.mesh, shape)

    def share(self, name: str, rank: int) -> torch.Tensor:
        if rank in self.mapped:
            return self.mapped[rank][name]
        with safe_open(self.files[rank], "pt") as file:  # opened every time: its pages are freed with the tensor
            value: torch.Tensor = file.get_tensor(name)
        return value
