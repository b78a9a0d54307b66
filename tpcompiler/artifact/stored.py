"""A program of an artifact that is read from its files, each graph once."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from tpcompiler._torch import tree_flatten
from tpcompiler.artifact.program import ArtifactProgram, Layout, Stored, tensors_of
from tpcompiler.checkpoint.fill import with_weights
from tpcompiler.checkpoint.ranks import RankShares
from tpcompiler.errors import ArtifactError
from tpcompiler.ir.symm_mem import expand_collectives
from tpcompiler.runtime.artifact import VALUES, WHOLE, Manifest, inside, lacks_weights, rank_file
from tpcompiler.runtime.program_files import ProgramFiles, open_program
from tpcompiler.runtime.pt2 import CONFIGS, EXAMPLES, MODEL, TENSORS, Pt2
from tpcompiler.runtime.rank_file import (
    Weights,
    load_rank,
    open_rank,
    put_state,
    read_graph,
    read_original,
    read_rank,
    read_state,
    read_whole,
    taken_by,
)
from tpcompiler.runtime.weights import laid_out
from tpcompiler.terminal.progress import counted


class StoredProgram(ArtifactProgram):
    """A program in the files that `save` wrote. What is asked for is read, its hash compared, and nothing else."""

    def __init__(self, files: ProgramFiles) -> None:
        self.files = files
        self.name = files.name
        self.title = os.fspath(files.folder)

    @classmethod
    def open(cls, directory: str | os.PathLike[str], *, trust: bool = False) -> StoredProgram:
        """Open the artifact of a single program, or the folder of one of several.

        Raises:
            ArtifactError: as `read_manifest`.
        """
        return cls(open_program(directory, trust=trust))

    @property
    def manifest(self) -> Manifest:
        return self.files.manifest

    def together(self) -> Sequence[ArtifactProgram]:
        return [self if files is self.files else StoredProgram(files) for files in self.files.together()]

    def beside(self) -> Mapping[str, Manifest]:
        return {name: files.manifest for name, files in self.files.beside.items()}

    def original(self) -> ExportedProgram:
        return read_original(self.files)

    def whole_program(self) -> ExportedProgram | None:
        return read_whole(self.files) if WHOLE in self.manifest.files else None

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
        if self.manifest.programs:
            return list(self.manifest.programs.values())
        alike: dict[object, list[int]] = {}
        try:
            for rank in range(self.world_size):
                with zipfile.ZipFile(inside(self.files.folder, rank_file(rank))) as archive:
                    graph = [(e.CRC, e.file_size) for e in archive.infolist() if e.filename.endswith(f"/{MODEL}")]
                alike.setdefault(tuple(graph), []).append(rank)
        except (OSError, zipfile.BadZipFile):  # reported when the program is read
            return [[rank] for rank in range(self.world_size)]
        return list(alike.values())

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
        own: Layout = "shared" if self.manifest.programs else "ranks"
        stored = {row.name: row.stored_in for row in self.manifest.tensors if row.stored_in is not None}
        if layout not in (None, own):
            raise ArtifactError(
                f"{self.title} has the layout {own!r}, and its files are copied",
                help="leave the layout out, or convert the model again",
            )
        if lacking := stored.keys() - elsewhere.keys():
            raise ArtifactError(
                f"{self.title} leaves {len(lacking)} tensors to the program next to it, such as {min(lacking)!r}",
                help="save all programs of the artifact together",
            )
        return self.files.copy

    def ranks(self) -> Iterator[tuple[ExportedProgram, Mapping[str, Any]]]:
        """Yield every rank's program and tensors, after comparing hashes.

        torch is slow to read a graph. If files have equal ones, that of the first is used for all.

        Raises:
            ArtifactError: a file is missing, damaged, unreadable or, without trust, could run code.
        """
        files, manifest = self.files, self.manifest
        if VALUES in manifest.files:
            files.open(VALUES).close()
        if manifest.programs:
            programs: dict[int, tuple[ExportedProgram, Mapping[str, Any]]] = {}
            for ranks in counted(list(manifest.programs.values()), "reading programs", "programs"):
                program = read_graph(files, ranks[0])
                for rank in ranks:
                    state = {} if lacks_weights(manifest) else read_state(files, rank, program)
                    programs[rank] = program, {**tensors_of(program), **state}
            yield from (programs[rank] for rank in range(manifest.world_size))
            return
        known: dict[str, tuple[Mapping[str, bool], ExportedProgram]] = {}
        for rank in counted(range(manifest.world_size), "reading programs", "ranks"):
            with open_rank(files, rank) as file:
                name, parameters = _fingerprint(file) or (str(file.path), {})
                others, alike = known.get(name, (parameters, None))
                # A tensor that one of the files lacks is found where tensors are compared.
                shared = others.keys() & parameters.keys()
                if alike is not None and all(others[each] == parameters[each] for each in shared):
                    yield alike, file.state()
                    continue
                program = load_rank(file, manifest)
                known[name] = parameters, program
            yield program, tensors_of(program)


def _numbers_only(
    manifest: Manifest, values: Mapping[str, torch.Tensor], rank: int, program: ExportedProgram
) -> dict[str, torch.Tensor]:
    return {name: torch.tensor([rows[rank]]) for name, rows in manifest.rank_numbers.items()}


def _fingerprint(file: Pt2) -> tuple[str, Mapping[str, bool]] | None:
    """Return a hash of the program without its tensors, and which tensors are parameters; None for another form.

    Of the examples only the structure is hashed; `.data/` has a hash of the whole file.
    """
    found, parameters = hashlib.sha256(), dict[str, bool]()
    try:
        for entry in sorted(file.names()):
            if entry.startswith(".data/") or TENSORS.fullmatch(entry):
                continue
            content = file.text(entry)
            if entry in CONFIGS.values():
                rows = json.loads(content)["config"].items()
                parameters.update({tensor: row["is_param"] for tensor, row in rows})
                content = b""
            elif entry == EXAMPLES and content:
                content = str(tree_flatten(torch.load(io.BytesIO(content), weights_only=True))[1]).encode()
            found.update(f"{entry} {len(content)} ".encode() + content)
    except (zipfile.BadZipFile, pickle.UnpicklingError, ValueError, LookupError, TypeError, AttributeError, OSError):
        return None
    return found.hexdigest(), parameters
