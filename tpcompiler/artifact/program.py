"""One named program of an artifact, which is in memory or in files: the interface that questions and judges use."""

from __future__ import annotations

import itertools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from tpcompiler._torch import FakeTensor
from tpcompiler.ir.memo import Memo
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.shares import mesh_of, same_bits
from tpcompiler.ir.symm_mem import expand_collectives
from tpcompiler.runtime.artifact import Manifest, lacks_weights
from tpcompiler.runtime.rank_file import Weights
from tpcompiler.runtime.records import Layout, TensorRecord

Stored = Mapping[str, str]  # leaf -> the program whose files have it


class ArtifactProgram(ABC):
    """A program of an artifact: converted in memory (`ConvertedProgram`), or stored in files (`StoredProgram`).

    Attributes:
        name: its name in the artifact; `model` for one that was given without a name.
        title: what messages call it.
    """

    name: str
    title: str

    @property
    @abstractmethod
    def manifest(self) -> Manifest:
        """The description of the program; without `files` and `notes` if it is in memory."""

    def describe(self) -> Manifest:
        """Return the manifest with notes, some of which take more searches to write."""
        return self.manifest

    @abstractmethod
    def together(self) -> Sequence[ArtifactProgram]:
        """Return all programs of the artifact in order, this one included; they share weights."""

    @abstractmethod
    def beside(self) -> Mapping[str, Manifest]:
        """Return the manifests of other programs that store tensors of this one, by name."""

    @abstractmethod
    def original(self) -> ExportedProgram:
        """Return the single-device program; its weights may have no values.

        Raises:
            ArtifactError: the file is missing, damaged or, without trust, could run code.
        """

    def whole_program(self) -> ExportedProgram | None:
        """Return the program that was cut into stages, of which this is the first; None for others."""
        return None

    @abstractmethod
    def fill(self, original: ExportedProgram, checkpoint: str | os.PathLike[str] | None = None) -> ExportedProgram:
        """Return a single-device program with its weights: its own, the checkpoint's or, without one, the ranks'.

        Raises:
            ArtifactError: there are no weights, or the checkpoint does not fit or is not needed.
        """

    @abstractmethod
    def graph(self, rank: int) -> ExportedProgram:
        """Return a rank's program; its weights may have no values.

        Raises:
            ArtifactError: as `original`; MeshError or ArtifactError: the rank is outside the world.
        """

    @abstractmethod
    def rank_program(self, rank: int, weights: Weights | None = None) -> ExportedProgram:
        """Return a rank's complete program; `weights` reads weights that are not cut yet.

        Raises:
            ArtifactError: as `graph`; or there are no weights.
        """

    @abstractmethod
    def ranks(self) -> Iterator[tuple[ExportedProgram, Mapping[str, Any]]]:
        """Yield every rank's program and tensors; ranks with equal graphs may share a program."""

    @abstractmethod
    def classes(self) -> Sequence[Sequence[int]]:
        """Return the groups of ranks that run one graph: they have equal local shapes."""

    @abstractmethod
    def share(self, name: str, rank: int) -> torch.Tensor:
        """Return a rank's share of a parameter, buffer or constant."""

    @abstractmethod
    def read(self, name: str) -> torch.Tensor:
        """Return a whole parameter, buffer or constant."""

    @abstractmethod
    def writer(
        self, *, keep_output_types: bool = False, layout: Layout | None = None, elsewhere: Stored
    ) -> Callable[[Path], None]:
        """Return the function that writes the program's files into a folder, without tensors that are elsewhere.

        Raises:
            UnsupportedError, ProgramError, ArtifactError: the files cannot have this form.
        """

    @cached_property
    def known(self) -> Memo:
        """Return what questions about it have found; it does not change."""
        return Memo()

    @property
    def mesh(self) -> Mesh:
        return mesh_of(self.manifest)

    @property
    def world_size(self) -> int:
        return self.manifest.world_size

    def shown(self, rank: int) -> ExportedProgram:
        """Return a rank's program as people see it, with ordinary collectives; weights need not be cut yet.

        Raises:
            ArtifactError: as `graph`.
        """
        return expand_collectives(self.rank_program(rank))


def stages_by_whole(programs: Mapping[str, ArtifactProgram]) -> dict[str, list[ArtifactProgram]]:
    """Return the stages of each program that was cut, in order."""
    found: dict[str, list[ArtifactProgram]] = {}
    for program in programs.values():
        if program.manifest.stage is not None:
            found.setdefault(program.manifest.stage.of, []).append(program)
    return found


def find_state_apart(programs: Mapping[str, ArtifactProgram]) -> str:
    """Describe a buffer that one program writes and another of the same model also holds; return "" without one.

    `parallelize` refuses such programs; files may have been put together since.
    """
    for (name, own), (other, theirs) in itertools.permutations(programs.items(), 2):
        if own.mesh == theirs.mesh or own.manifest.family == theirs.manifest.family:
            continue
        rows, others = ({row.name: row for row in each.manifest.tensors} for each in (own, theirs))
        common = rows.keys() & others.keys()
        states = sorted(common & {*own.graph(0).graph_signature.buffers_to_mutate.values()})
        if states and len(states) < len(common) and all(_is_same(own, theirs, rows[n], others[n]) for n in common):
            return (
                f"{states[0]!r} is a buffer that {name!r} writes on {own.mesh}, and {other!r} has its own on "
                f"{theirs.mesh}, which sees nothing of it"
            )
    return ""


def _is_same(own: ArtifactProgram, theirs: ArtifactProgram, row: TensorRecord, other: TensorRecord) -> bool:
    if (row.shape, row.dtype) != (other.shape, other.dtype):
        return False
    if lacks_weights(own.manifest) or lacks_weights(theirs.manifest):
        return True  # a checkpoint gives both the same
    values = own.read(row.name), theirs.read(row.name)
    return any(isinstance(value, FakeTensor) for value in values) or same_bits(*values)
