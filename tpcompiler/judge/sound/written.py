"""Read the programs of an artifact from its files, each graph once."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.export import ExportedProgram

from tpcompiler._torch import guards_of, read_archive_state, tree_flatten
from tpcompiler.ir.symm_mem import Room, rooms_of
from tpcompiler.runtime.archive import TENSORS
from tpcompiler.runtime.artifact import Manifest, lacks_weights
from tpcompiler.runtime.opened import Opened
from tpcompiler.runtime.rank_file import load_rank, open_rank, read_state
from tpcompiler.terminal.progress import counted

GRAPH = "models/model.json"
Prepare = Callable[[ExportedProgram], ExportedProgram]


@dataclass(frozen=True)
class WrittenRank:
    """One rank's program and its tensors; ranks with one graph may share a program.

    `guards`: the file's assertions on inputs; `rooms`: its symmetric memory. Passes on the program lose both.
    """

    program: ExportedProgram
    state: Mapping[str, Any]
    guards: Sequence[str]
    rooms: Mapping[str, Room] = field(default_factory=dict)


def written(program: ExportedProgram, prepare: Prepare = lambda program: program) -> WrittenRank:
    held = {**program.constants, **program.state_dict}
    return WrittenRank(prepare(program), held, guards_of(program), rooms_of(program))


def read_ranks(
    directory: str | os.PathLike[str],
    manifest: Manifest,
    prepare: Prepare = lambda program: program,
    *,
    trust: bool = False,
) -> list[WrittenRank]:
    """Read all ranks' programs, after comparing their hashes.

    torch is slow to read a graph. If files have equal ones, that of the first is used for all.

    Raises:
        ArtifactError: a file is missing, damaged, unreadable or, without `trust`, could run code.
    """
    if manifest.programs:
        return _read_shared(directory, manifest, prepare, trust)
    known: dict[str, WrittenRank] = {}
    rests: list[Any] = []
    programs: list[WrittenRank] = []
    for rank in counted(range(manifest.world_size), "reading programs", "ranks"):
        with open_rank(directory, manifest, rank, trust=trust) as file:
            graph = _graph(file)
            rests.append(_rest(file))
            if not _are_alike(rests[0], rests[-1]):
                graph = None  # only torch can decide whether it reads that
            name = hashlib.sha256(graph).hexdigest() if graph is not None else str(file.path)
            if name in known:
                programs.append(replace(known[name], state=read_archive_state(file.path, file)))
                continue
            known[name] = written(load_rank(file, manifest), prepare)
        programs.append(known[name])
    return programs


def _read_shared(
    directory: str | os.PathLike[str],
    manifest: Manifest,
    prepare: Prepare,
    trust: bool,
) -> list[WrittenRank]:
    programs: dict[int, WrittenRank] = {}
    for ranks in counted(list(manifest.programs.values()), "reading programs", "programs"):
        with open_rank(directory, manifest, ranks[0], trust=trust) as file:
            whole = load_rank(file, manifest)
        made = written(whole, prepare)
        for rank in ranks:
            state = {} if lacks_weights(manifest) else read_state(directory, manifest, rank, whole)
            programs[rank] = replace(made, state={**made.state, **state})
    return [programs[rank] for rank in range(manifest.world_size)]


def _graph(file: Opened) -> bytes | None:
    """Return the entry with the whole program except its tensors; None for a file of another form."""
    try:
        with zipfile.ZipFile(file) as archive:
            (name,) = (name for name in archive.namelist() if name.partition("/")[2] == GRAPH)
            return archive.read(name)
    except (zipfile.BadZipFile, ValueError, OSError):
        return None


def _rest(file: Opened) -> tuple[dict[str, bytes], dict[str, object]] | None:
    """Return a file's other entries, and the tensors that are parameters; None for another form."""
    entries, parameters = {}, {}
    try:
        with zipfile.ZipFile(file) as archive:
            for name in archive.namelist():
                entry = name.partition("/")[2]
                if entry.endswith("_config.json"):
                    rows = json.loads(archive.read(name))["config"].items()
                    parameters.update({tensor: row["is_param"] for tensor, row in rows})
                elif entry != GRAPH and not entry.startswith(".data/") and not TENSORS.fullmatch(entry):
                    # `.data/` has a hash of the whole file. For examples, only the structure matters.
                    entries[entry] = archive.read(name)
                    if "sample_inputs" in entry:
                        entries[entry] = _structure(entries[entry])
        return entries, parameters
    except (zipfile.BadZipFile, pickle.UnpicklingError, ValueError, LookupError, TypeError, AttributeError, OSError):
        return None


def _structure(pickled: bytes) -> bytes:
    examples = torch.load(io.BytesIO(pickled), weights_only=True) if pickled else None
    return str(tree_flatten(examples)[1]).encode()


def _are_alike(one: tuple[Any, Any] | None, other: tuple[Any, Any] | None) -> bool:
    """Return True if torch reads both files or neither; a tensor that one of them lacks is detected elsewhere."""
    if one is None or other is None or one[0] != other[0]:
        return False
    return all(one[1][name] == other[1][name] for name in one[1].keys() & other[1].keys())
