"""The whole tensors of an artifact, each joined from its ranks' shares when it is read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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

    Attributes:
        tensors, config: as of a `Checkpoint`.

    Raises:
        ArtifactError: the artifact is missing, damaged, or without weights.
    """

    def __init__(self, *programs: ProgramFiles) -> None:
        folders = [each.folder for each in programs]
        self.path = folders[0] if len(folders) == 1 else folders[0].parent
        self.tensors: dict[str, TensorEntry] = {}
        self.config: Mapping[str, Any] = {}
        self._placed: dict[str, Any] = {}  # (sharding, mesh, the file of each rank with its tensors), by tensor
        known = {each.folder: each for each in programs}
        known |= {each.folder: each for own in programs for each in own.beside.values() if each.folder not in known}
        for files in known.values():
            shardings, mesh = shardings_of(files.manifest), mesh_of(files.manifest)
            ranks = [map_weights(files, rank) for rank in range(mesh.world_size)]
            for leaf in leaves_of(files.manifest):
                self.tensors[leaf.name], self._placed[leaf.name] = leaf, (shardings[leaf.name], mesh, ranks)

    def read(self, name: str) -> torch.Tensor:
        """Read a whole tensor; one that no axis cuts is mapped."""
        entry, (sharding, mesh, ranks) = self.tensors[name], self._placed[name]
        folder, again = ranks[0][0].parent, "copy the artifact again"
        with explaining(f"{folder}: {name!r} cannot be put together", again, ValueError, LookupError):
            refuse_unlike(lambda rank: self.share(name, rank), sharding, mesh, entry.shape)
            value = join_first(lambda rank: self.share(name, rank), sharding, mesh, entry.shape)
        if value.dtype != entry.dtype:
            raise ArtifactError(f"{folder}: {name!r} is {value.dtype}, the manifest says {entry.dtype}", help=again)
        return value

    def share(self, name: str, rank: int) -> torch.Tensor:
        """Map one rank's share of a tensor."""
        *_, ranks = self._placed[name]
        path, held = ranks[rank]
        if path.suffix == ".safetensors":  # opened every time: its pages are freed with the tensor
            with safe_open(path, "pt") as file:
                return file.get_tensor(name)  # type: ignore[no-any-return]
        return held[name]  # type: ignore[no-any-return]

    def fingerprint(self) -> dict[str, list[int]]:
        """Return the size and times of every file, to detect a change."""
        files = {path for *_, ranks in self._placed.values() for path, _ in ranks}
        return {str(file): state_of(file) for file in sorted(files)}


Source = Checkpoint | RankShares  # of whole tensors, one at a time
