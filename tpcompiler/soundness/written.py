"""The programs of an artifact as they lie in its files, each graph read once."""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.export import ExportedProgram

from tpcompiler._torch import read_archive_state
from tpcompiler.runtime.archive import inspect_archive
from tpcompiler.runtime.artifact import Manifest, checked_file
from tpcompiler.runtime.model_file import read_model

GRAPH = "models/model.json"


@dataclass(frozen=True)
class Written:
    """One rank's program beside the tensors that it holds; ranks with one graph may have one program."""

    program: ExportedProgram
    state: Mapping[str, Any]


def written(program: ExportedProgram) -> Written:
    return Written(program, {**program.constants, **program.state_dict})


def read_ranks(
    directory: str | os.PathLike[str],
    manifest: Manifest,
    prepare: Callable[[ExportedProgram], ExportedProgram] = lambda program: program,
    *,
    trust: bool = False,
) -> list[Written]:
    """All ranks' programs, with their hashes compared; where files have equal graphs, that of the first serves.

    Raises:
        ArtifactError: a file that is missing, damaged, cannot be read, or, without `trust`, could run code.
    """
    known: dict[str, ExportedProgram] = {}
    found = []
    for rank in range(manifest.world_size):
        path = checked_file(directory, manifest, rank)
        graph = _graph_hash(path)
        if graph in known:
            if not trust:
                inspect_archive(path)
            found.append(Written(known[graph], read_archive_state(path)))
        else:
            whole = read_model(path, trust=trust)
            known[graph] = prepare(whole)
            found.append(Written(known[graph], {**whole.constants, **whole.state_dict}))
    return found


def _graph_hash(path: Path) -> str:
    """Of the bytes that say all of a program but its tensors; of the path, for a file of another form."""
    try:
        with zipfile.ZipFile(path) as archive:
            (name,) = (name for name in archive.namelist() if name.partition("/")[2] == GRAPH)
            return hashlib.sha256(archive.read(name)).hexdigest()
    except (zipfile.BadZipFile, ValueError, OSError):
        return str(path)
