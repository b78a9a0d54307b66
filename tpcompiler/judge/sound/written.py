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
    programs: list[WrittenRank] = []
    for rank in counted(range(manifest.world_size), "reading programs", "ranks"):
        with open_rank(directory, manifest, rank, trust=trust) as file:
            name = _fingerprint(file) or str(file.path)
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


def _fingerprint(file: Opened) -> str | None:
    """Return a hash of all that torch makes the program of, without the tensors' values; None for another form.

    Of examples the structure counts, of the tables of tensors which are parameters; `.data/` has a hash of the file.
    """
    found = hashlib.sha256()
    try:
        with zipfile.ZipFile(file) as archive:
            for name in sorted(archive.namelist()):
                entry = name.partition("/")[2]
                if entry.startswith(".data/") or TENSORS.fullmatch(entry):
                    continue
                content = archive.read(name)
                if entry.endswith("_config.json"):
                    rows = json.loads(content)["config"].items()
                    content = repr(sorted((tensor, row["is_param"]) for tensor, row in rows)).encode()
                elif "sample_inputs" in entry and content:
                    content = str(tree_flatten(torch.load(io.BytesIO(content), weights_only=True))[1]).encode()
                found.update(f"{entry} {len(content)} ".encode() + content)
    except (zipfile.BadZipFile, pickle.UnpicklingError, ValueError, LookupError, TypeError, AttributeError, OSError):
        return None
    return found.hexdigest()
