"""The artifact on disk: `manifest.json`, a `program.pt2` for all ranks with equal graphs, and each rank's weights.

The weights are in a `rank_N.pt2`, with the program, so that torch alone can run it; in the shared layout they are in a
`rank_N.safetensors`.
"""

from __future__ import annotations

import contextlib
import json
import os
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from msgspec.structs import replace

from tpcompiler.errors import ArtifactError, reason
from tpcompiler.runtime.hub import refuse_hub_directory, refuse_missing_artifact
from tpcompiler.runtime.opened import Opened, read_text
from tpcompiler.runtime.records import Layout, Package, ProgramList, Record, StageRecord, plain_data, read_record
from tpcompiler.runtime.records import Manifest as Manifest
from tpcompiler.runtime.target import CUT, MANIFEST, PARTS, SET, free_target, in_place_of, replacing

VERSION = "0.1.0"
FORMAT = 2
SINGLE = "model"  # the name of a program that was given without one
VALUES = "values.safetensors"
MODEL = "model.pt2"  # the program that was converted, without its weights
WHOLE = "whole.pt2"  # in the folder of the first stage: the program that was cut into stages, without its weights


def is_single(names: Iterable[str]) -> bool:
    """Return True for the only program of an artifact, given without a name: the directory itself has its files."""
    return [*names] == [SINGLE]


def rank_file(rank: int) -> str:
    return f"rank_{rank}.pt2"


def weights_file(rank: int, layout: Layout = "shared") -> str:
    """Return the file that has, or will have, a rank's weights: in the shared layout without a program."""
    return f"rank_{rank}{'.pt2' if layout == 'ranks' else '.safetensors'}"


def lacks_weights(manifest: Manifest) -> list[int]:
    """Return the ranks whose weights must still be cut from a checkpoint."""
    ranks = range(manifest.world_size) if manifest.files else ()
    return [rank for rank in ranks if weights_file(rank, manifest.layout) not in manifest.files]


def program_file(manifest: Manifest, rank: int) -> str:
    """Return the file with the program that a rank runs."""
    return next(name for name, ranks in manifest.programs.items() if rank in ranks)


Inspect = Callable[[Path], None]
Listing = TypeVar("Listing", Manifest, ProgramList)


def write_artifact(
    directory: str | os.PathLike[str],
    programs: Mapping[str, Callable[[Path], None]],
    *,
    force: bool = False,
    inspect: Inspect = lambda directory: None,
    compiled: Package | None = None,
) -> None:
    """Write all files into a temporary sibling of `directory`, then move them into place.

    Args:
        programs: program -> the function that writes its files into a folder. A program called `model` that is alone
            has its files in the directory itself; others have a folder of their name, and there is a list of them.
        inspect: called with the temporary directory; if it raises, nothing is left behind.
        compiled: the package of several programs, for the list.

    Raises:
        ArtifactError: the directory exists and `force` is not set, or a file cannot be written; nothing is left behind.
    """
    with in_place_of(free_target(directory, force=force), force=force) as temporary:
        if is_single(programs):
            programs[SINGLE](temporary)
        else:
            for name, write in programs.items():
                (temporary / name).mkdir()
                write(temporary / name)
            write_record(temporary / SET, ProgramList(format=FORMAT, programs=list(programs), compiled=compiled))
        inspect(temporary)


def say_files(directory: Path, manifest: Manifest, files: Mapping[str, str]) -> None:
    """Add files with their SHA-256 to the manifest.

    Raises:
        OSError: the manifest cannot be written.
    """
    with replacing(directory / MANIFEST) as path:
        write_record(path, replace(manifest, files={**manifest.files, **files}))


def write_record(path: Path, record: Record) -> None:
    """Write a manifest, or a list of programs."""
    path.write_text(json.dumps(plain_data(record), indent=1) + "\n", encoding="utf-8")


def read_manifest(directory: str | os.PathLike[str]) -> Manifest:
    """Read and check the manifest of an artifact.

    Raises:
        ArtifactError: there is no artifact, or its manifest is unreadable, damaged, or of another format version.
    """
    path = inside(directory, MANIFEST)
    if programs := programs_in(directory):
        raise ArtifactError(
            f"{directory} holds the programs {', '.join(programs)}",
            help=f"give one of them: {path.parent / programs[0]}",
        )
    try:
        manifest = _read_listing(path, Manifest)
    except (FileNotFoundError, NotADirectoryError) as error:
        refuse_missing_artifact(directory)
        refuse_hub_directory(directory)
        state = "is a file, not the directory of an artifact"
        if os.path.isdir(directory):
            state = f"is not an artifact: it has no {MANIFEST}"
        raise ArtifactError(f"{directory} {state}", help="make one with tpcompiler convert") from error
    every = {*manifest.programs, *(weights_file(rank, manifest.layout) for rank in range(manifest.world_size))}
    there = set(manifest.files) - {MODEL, WHOLE}
    is_filled = manifest.layout == "shared" and {*manifest.programs, VALUES} <= there <= {*every, VALUES}
    if not manifest.programs or not (there == every or is_filled):
        raise ArtifactError(
            f"{path} names files {sorted(manifest.files)} for {manifest.world_size} ranks",
            help="convert the model again",
        )
    # Two artifacts that were copied into one directory: which of them each file is of, nobody can say.
    there = {file.name for file in Path(directory).iterdir()}
    unfinished: set[str] = (
        every if CUT in there else set()
    )  # a cut that was ended before the manifest named its last files
    known = {MANIFEST, *manifest.files, *(manifest.compiled.files if manifest.compiled else ())}
    stray = set(filter(PARTS.fullmatch, there)) - known - unfinished
    if stray:
        raise ArtifactError(
            f"{path.parent / min(stray)} is of another artifact: the manifest names {manifest.world_size} files",
            help="copy the artifact again, into an empty directory",
        )
    return manifest


def _read_listing(path: Path, kind: type[Listing]) -> Listing:
    """Read a manifest, or a list of programs.

    Raises:
        FileNotFoundError, NotADirectoryError: no such file.
        ArtifactError: unreadable, of another format version, or of another form.
    """
    again = f"convert the model{'s' * (kind is ProgramList)} again"
    try:
        data = json.loads(read_text(path))
    except (FileNotFoundError, NotADirectoryError):
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise ArtifactError(f"{path} cannot be read: {reason(error)}", help=again) from error
    if (version := data.get("format") if isinstance(data, Mapping) else None) != FORMAT:
        raise ArtifactError(
            f"{path} has format {version!r}{_writer(data)}, this tpcompiler {VERSION} reads format {FORMAT}", help=again
        )
    try:
        return read_record(kind, data)
    except ValueError as error:
        raise ArtifactError(f"{path} is damaged{error}", help=again) from error


def _writer(data: Any) -> str:
    versions = data.get("versions") if isinstance(data, Mapping) else None
    writer = versions.get("tpcompiler") if isinstance(versions, Mapping) else None
    return f" of tpcompiler {writer}" if isinstance(writer, str) else ""


def read_programs(directory: str | os.PathLike[str]) -> ProgramList | None:
    """Read the list of programs that `write_set` wrote there, or None.

    Raises:
        ArtifactError: a list that cannot be read, or a name that leads out of the directory.
    """
    try:
        listed = _read_listing(inside(directory, SET), ProgramList)
    except (FileNotFoundError, NotADirectoryError):
        return None
    for name in listed.programs:
        inside(directory, name)
    return listed


def programs_in(directory: str | os.PathLike[str]) -> list[str]:
    """Return the names of the programs in a directory of several, in order; none elsewhere.

    Raises:
        ArtifactError: as `read_programs`.
    """
    listed = read_programs(directory)
    return listed.programs if listed else []


def inside(directory: str | os.PathLike[str], name: str) -> Path:
    """Return the path of a file of the artifact; reject links that lead out of the directory."""
    path = Path(directory) / name
    if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(directory)):
        raise ArtifactError(f"{path} leads out of {os.fspath(directory)}", help="copy the files themselves, not links")
    return path


def open_known(
    directory: str | os.PathLike[str],
    files: Mapping[str, str],
    name: str,
    again: str = "copy the artifact again, or convert the model again",
) -> Opened:
    """Open a file of an artifact, after comparing its hash with the one in `files`.

    Raises:
        ArtifactError: the file is missing, a link to elsewhere, or has other content; or `files` does not name it.
    """
    path = inside(directory, name)
    if name not in files:
        raise ArtifactError(f"{path} is not listed in the artifact", help=again)
    try:
        file = Opened(path)
        if not (wrong := _other_than_written(file, files[path.name])):
            return file
        file.close()
    except FileNotFoundError as error:
        raise ArtifactError(f"{path} is missing", help=again) from error
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {reason(error)}", help=again) from error
    raise ArtifactError(f"{path} {wrong}", help=again)


def _other_than_written(file: Opened, hash: str) -> str:
    """Describe a file whose hash differs, or that was written for another rank; empty if neither."""
    if (actual := file.sha256()) != hash:
        return f"has SHA-256 {actual[:12]}.., the manifest says {hash[:12]}.."
    # The graphs of all ranks may be equal: then only this name reveals that a file has another rank's weights.
    with contextlib.suppress(zipfile.BadZipFile, ValueError, NotImplementedError), zipfile.ZipFile(file) as archive:
        folder = archive.namelist()[0].partition("/")[0] if archive.namelist() else ""
        if folder.startswith("rank_") and folder != file.path.stem:
            return f"was written as {folder}.pt2"
    return ""


def sha256(path: Path) -> str:
    with Opened(path) as file:
        return file.sha256()


T = TypeVar("T")


def families(programs: Mapping[str, T], family_of: Callable[[T], str | None]) -> list[dict[str, T]]:
    """Return the programs of each family, in the order of their first ones."""
    found: dict[str | None, dict[str, T]] = {}
    for name, program in programs.items():
        found.setdefault(family_of(program), {})[name] = program
    return [*found.values()]


def world_of(manifest: Manifest) -> int:
    """Return the number of ranks of a program, or of all stages of the one that it is a stage of."""
    return manifest.world_size * (manifest.stage.count if manifest.stage else 1)


def largest_world(programs: Mapping[str, Manifest]) -> int:
    """Return the number of ranks that run the programs of an artifact."""
    return max(map(world_of, programs.values()))


def misfit_of(programs: Mapping[str, Manifest]) -> str:
    """Return the reason why programs cannot run together; empty if they can."""
    world = largest_world(programs)
    for name, manifest in programs.items():
        if world % world_of(manifest):
            return f"{name!r} is for {world_of(manifest)} ranks, which do not divide the {world} of the artifact"
    stages: dict[str, list[StageRecord]] = {}
    for manifest in programs.values():
        if manifest.stage is not None:
            stages.setdefault(manifest.stage.of, []).append(manifest.stage)
    for whole, own in stages.items():
        if [stage.index for stage in own] != list(range(own[0].count)):
            return f"stages {[stage.index for stage in own]} of {whole!r} are not all of {own[0].count}, in order"
    is_known = all(manifest.family for manifest in programs.values())  # one that was converted alone has none
    for family in families(programs, lambda manifest: manifest.family if is_known else None):
        if misfit := _misfit_within(family):
            return misfit
    return ""


def _misfit_within(family: Mapping[str, Manifest]) -> str:
    holders: dict[str, str] = {}
    first, other = next(iter(family.items()))
    for name, manifest in family.items():
        if manifest.mesh != other.mesh:
            return f"{name!r} is for the mesh {manifest.mesh}, and {first!r} for {other.mesh}"
        if manifest.factors != other.factors:
            return f"{name!r} has axes in factors {manifest.factors}, and {first!r} in {other.factors}"
        for row in manifest.tensors:
            if row.stored_in is None and holders.setdefault(row.name, name) != name:
                return f"{row.name!r} is stored in the files of {holders[row.name]!r} and again in those of {name!r}"
    return ""
