"""Convert an artifact to another number of ranks, or back to one program."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from torch.export import ExportedProgram

from tpcompiler._torch import all_tensors, archive_stream, save_program
from tpcompiler.artifact.program import ArtifactProgram
from tpcompiler.artifact.stored import StoredProgram
from tpcompiler.checkpoint.cut import TELL, Progress, cut_programs
from tpcompiler.checkpoint.fill import fill_weights
from tpcompiler.checkpoint.ranks import RankShares
from tpcompiler.cost.machine_file import machine_of
from tpcompiler.errors import ArtifactError, UnsupportedError, explaining
from tpcompiler.frontend.refused import refuse_hollow
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.shares import same_bits
from tpcompiler.judge.sound.check import read_proved_model
from tpcompiler.parallel.conversion import Conversion, share_conversions
from tpcompiler.parallel.converted_program import ConvertedProgram, convert_programs
from tpcompiler.parallel.program_subject import on_cpu
from tpcompiler.passes.canonicalize import canonicalize
from tpcompiler.plan.plan import Plan, join_plans
from tpcompiler.runtime.artifact import MODEL, Manifest, families, is_single, largest_world
from tpcompiler.runtime.program_files import ProgramFiles, open_programs
from tpcompiler.runtime.target import free_target, in_place_of, refuse_full_disk, replacing
from tpcompiler.runtime.weightless import weightless_names
from tpcompiler.runtime.weights import TensorEntry, dtype_of, lay_out, write_weights


def reshard(
    programs: Mapping[str, ArtifactProgram],
    write: Callable[[Mapping[str, ArtifactProgram], Path], None],
    mesh: Mesh,
    directory: str | os.PathLike[str],
    *,
    force: bool = False,
    progress: Progress = TELL,
) -> None:
    """Write an artifact for another mesh, with the same plan (`ParallelProgram.reshard`).

    Args:
        write: writes programs in the shared layout.

    Raises:
        ArtifactError: there are no weights, or the directory cannot be written.
        MeshError, ShardingError, ...: as `parallelize`, if the plan does not suit the mesh.
    """
    target = free_target(directory, force=force)
    stored = [program.files for program in programs.values() if isinstance(program, StoredProgram)]
    _refuse_inside(stored, target)
    sources = [RankShares(*own.values()) for own in _families(stored)]  # rejects bad files before what follows
    originals = {name: _read_model(program) for name, program in programs.items()}
    manifests = {name: program.manifest for name, program in programs.items()}
    first = next(iter(manifests.values()))
    if first.stage is not None:
        raise UnsupportedError("stages are not cut again for another mesh", help="convert the model for the mesh")
    world = largest_world(manifests)  # programs of fewer ranks keep their mesh
    plan = join_plans([Plan.of(manifest.plan) for manifest in manifests.values()])
    machine = machine_of(first.asked)
    conversions = {
        name: Conversion.of(
            originals[name],
            mesh if manifest.world_size == world else Mesh.of(manifest.mesh),
            plan,
            manifest.asked,
            machine,
            first.device_type,
        )
        for name, manifest in manifests.items()
    }
    if not is_single(conversions):
        conversions = share_conversions(
            {name: replace(own, family=manifests[name].family or "") for name, own in conversions.items()}
        )
    converted = dict[str, ConvertedProgram]()
    for family in families(conversions, lambda own: own.family):
        converted |= convert_programs(family)[1]
    converted = {name: converted[name] for name in conversions}
    with in_place_of(target, force=force) as temporary:
        try:
            write(converted, temporary / "new")
            for file in (temporary / "new").iterdir():
                file.rename(temporary / file.name)
            (temporary / "new").rmdir()
            if any(map(weightless_names, originals.values())):
                written = _families(open_programs(temporary).values())
                for own, source in zip(written, sources, strict=bool(sources)):
                    cut_programs(own.values(), source, partial=True, progress=progress)
        except ArtifactError as error:
            if isinstance(error.__cause__, OSError) and os.fspath(temporary) in error.message:
                raise error.__cause__ from None  # `in_place_of` names the target, and nothing remains to continue from
            raise


def _families(files: Iterable[ProgramFiles]) -> list[dict[str, ProgramFiles]]:
    return families({each.name: each for each in files}, lambda each: each.manifest.family)


def merge(program: ArtifactProgram, path: str | os.PathLike[str], *, safetensors: bool = False) -> None:
    """Write the single-device program with its weights (`ParallelProgram.merge`).

    Raises:
        ArtifactError: there are no weights, or the file cannot be written.
    """
    target, source = Path(path), None
    if isinstance(program, StoredProgram):
        _refuse_inside([program.files], target)
        source = program.tensors
    original = _read_model(program)
    refuse_hollow(original, "merged") if source is None else None
    sizes = [math.prod(row.shape) * dtype_of(row.dtype).itemsize for row in program.manifest.tensors if not row.tied_to]
    with explaining(f"cannot write {target}", "check the path and the free space", OSError, RuntimeError):
        if safetensors:
            rows = {row.name: row for row in program.manifest.tensors}
            first = _persistent(program.manifest, original)
            entries = lay_out(TensorEntry(n, dtype_of(rows[n].dtype), tuple(rows[n].shape)) for n in first)
            with replacing(target) as file:
                refuse_full_disk(file, sum(entry.nbytes for entry in entries))
                write_weights(file, entries, (program.read(first[entry.name]) for entry in entries))
            return
        with replacing(target) as file, tempfile.TemporaryDirectory(prefix=".merge.", dir=file.parent) as folder:
            refuse_full_disk(file, 2 * sum(sizes))  # for the file, and for the weights that it is written from
            if source is not None:
                _fill_from_disk(original, source, Path(folder))
            with archive_stream(file) as stream:
                save_program(original, stream)


def _read_model(program: ArtifactProgram) -> ExportedProgram:
    """Return the model that the ranks run; the values in its file, such as literals, must equal the ranks'.

    Raises:
        ArtifactError: as `read_proved_model`; or a value differs.
    """
    if not isinstance(program, StoredProgram):
        return program.original()
    original = read_proved_model(program, prepare=on_cpu, canonical=canonicalize)
    first = {row.name: row.holder for row in program.manifest.tensors}
    hollow = weightless_names(original)
    for name, value in all_tensors(original).items():
        held = first.get(name)
        if name not in hollow and held in program.tensors.tensors and not same_bits(value.detach(), program.read(held)):
            raise ArtifactError(
                f"{program.title}: {name!r} in {MODEL} is not what the ranks hold",
                help="copy the artifact again, or convert the model again",
            )
    return original


def _persistent(manifest: Manifest, program: ExportedProgram) -> dict[str, str]:
    """Return the first persistent name of each tensor -> the ranks' name for it."""
    first: dict[str, str] = {}
    for row in manifest.tensors:
        if row.name in program.state_dict and row.holder not in first.values():
            first[row.name] = row.holder
    return first


def _refuse_inside(programs: Sequence[ProgramFiles], target: Path) -> None:
    for files in programs:
        if Path(os.path.realpath(target)).is_relative_to(os.path.realpath(files.folder)) and not os.path.samefile(
            files.folder, target if os.path.exists(target) else os.curdir
        ):
            raise ArtifactError(f"{target} is inside {files.folder}, which it is made from", help="choose another path")


def _fill_from_disk(program: ExportedProgram, source: RankShares, folder: Path) -> None:
    """Give a program its weights, each mapped from a temporary file, so that memory need not hold them."""

    def on_disk(name: str, value: torch.Tensor) -> torch.Tensor:
        file = folder / str(len(list(folder.iterdir())))
        once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in value.stride())  # skips expanded dims
        own = torch.empty_strided(value[once].shape, value.stride(), dtype=value.dtype).copy_(value[once])
        file.write_bytes(
            torch.empty(0, dtype=torch.uint8).set_(own.untyped_storage()).numpy().data
        )  # raises if the disk is full
        storage = cast(torch.UntypedStorage, torch.UntypedStorage.from_file(str(file), False, file.stat().st_size))
        return torch.empty(0, dtype=value.dtype).set_(storage, 0, value.shape, value.stride())

    fill_weights(program, source, partial=True, keep=on_disk)
