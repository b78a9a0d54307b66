"""Convert an artifact to another number of ranks, or back to one program, from its files alone."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch.export import ExportedProgram

from tpcompiler._torch import archive_stream, save_program
from tpcompiler.api import conversions_of
from tpcompiler.checkpoint.cut import TELL, Progress, cut_checkpoint
from tpcompiler.checkpoint.fill import fill_weights
from tpcompiler.checkpoint.ranks import RankShares
from tpcompiler.cost.machine_file import machine_of
from tpcompiler.errors import ArtifactError, reason
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.shares import same_bits
from tpcompiler.judge.sound.check import read_proved_model
from tpcompiler.parallel.compared import on_cpu
from tpcompiler.parallel.conversion import asked_boundary
from tpcompiler.parallel.program_set import ProgramSet
from tpcompiler.passes.canonicalize import canonicalize
from tpcompiler.pipeline import convert_programs
from tpcompiler.plan import Plan, join_plans
from tpcompiler.runtime.artifact import MODEL, Manifest, programs_in, read_manifest
from tpcompiler.runtime.target import free_target, in_place_of, refuse_full_disk, replacing
from tpcompiler.runtime.weightless import weightless_names
from tpcompiler.runtime.weights import TensorEntry, lay_out, write_weights
from tpcompiler.solver.task import Aim


def reshard(
    directory: str | os.PathLike[str],
    mesh: int | Mapping[str, int] | Mesh,
    out: str | os.PathLike[str],
    *,
    force: bool = False,
    trust: bool = False,
    progress: Progress = TELL,
) -> None:
    """Write an artifact for another mesh, with the same plan, from an artifact alone.

    The program is converted again from the artifact's `model.pt2`, and its weights, joined from the
    ranks' shares, are cut one tensor at a time (docs/scale.md lists the memory needed). They are the same bits.
    The result has the shared layout.

    Args:
        directory: an artifact with weights, or a set of programs.
        mesh: the degree of a single axis `tp`, or `{axis: degree}`.
        out: the directory to write.
        force: replace an earlier artifact there.
        trust: also read files that need a pickle or could run code (docs/security.md).
        progress: called with (bytes written, total).

    Raises:
        ArtifactError: there is no artifact with weights, or `out` cannot be written.
        MeshError, ShardingError, ...: as `parallelize`, if the plan does not suit the mesh.
    """
    mesh, target = Mesh.of(mesh), free_target(out, force=force)
    _refuse_inside(directory, target)
    names = programs_in(directory)
    manifests = {name: read_manifest(Path(directory) / name) for name in names or [""]}
    source = RankShares(directory, trust=trust)  # rejects bad files before the expensive steps below
    programs: Any = {
        name: _read_model(Path(directory) / name, manifest, source, trust) for name, manifest in manifests.items()
    }
    first = next(iter(manifests.values()))
    plan = join_plans([Plan.of(manifest.plan) for manifest in manifests.values()])
    how: Any = {"device_type": first.device_type, "collectives": first.asked.collectives}
    how["check_indices"] = first.asked.check_indices
    asked: Any = {
        at: {name: asked_boundary(manifest, at) for name, manifest in manifests.items()} for at in ("inputs", "outputs")
    }
    if not names:
        programs, asked = programs[""], {at: by_name[""] for at, by_name in asked.items()}
    machine = machine_of(first.asked)
    aim = Aim(machine, machine.usable_memory if plan.searches else None)
    made: Any = convert_programs(conversions_of(programs, mesh, plan, **asked, **how), aim)[1]
    made = ProgramSet(made) if names else made[""]
    hollow = [weightless_names(each) for each in (programs.values() if names else [programs])]
    with in_place_of(target, force=force) as temporary:
        try:
            made.save(temporary / "new", layout="shared", keep_output_types=True)  # other classes are dicts already
            for file in (temporary / "new").iterdir():
                file.rename(temporary / file.name)
            (temporary / "new").rmdir()
            if any(hollow):
                cut_checkpoint(temporary, source, partial=True, progress=progress)
        except ArtifactError as error:
            if isinstance(error.__cause__, OSError) and os.fspath(temporary) in error.message:
                raise error.__cause__ from None  # `in_place_of` names the target, and nothing remains to continue from
            raise


def merge(
    directory: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    safetensors: bool = False,
    trust: bool = False,
) -> None:
    """Write the single-device program that an artifact was made from, with its weights, from the artifact alone.

    Weights are joined one at a time, and are the same bits. A class that the model returned is a plain dict, as
    in the artifact.

    Args:
        directory: an artifact with weights; one program of a set.
        path: the .pt2 to write.
        safetensors: write a checkpoint instead: the parameters and persistent buffers by name, tied ones once.
        trust: also read files that need a pickle or could run code (docs/security.md).

    Raises:
        ArtifactError: there is no artifact with weights, or the file cannot be written.
    """
    manifest, target = read_manifest(directory), Path(path)
    _refuse_inside(directory, target)
    source = RankShares(directory, trust=trust)
    program = _read_model(directory, manifest, source, trust)
    try:
        if safetensors:
            first = _persistent(manifest, program)
            stored = {name: source.tensors[first[name]] for name in first}
            entries = lay_out(TensorEntry(name, each.dtype, each.shape) for name, each in stored.items())
            with replacing(target) as file:
                refuse_full_disk(file, sum(entry.nbytes for entry in entries))
                write_weights(file, entries, (source.read(first[entry.name]) for entry in entries))
            return
        size = sum(math.prod(each.shape) * each.dtype.itemsize for each in source.tensors.values())
        with replacing(target) as file, tempfile.TemporaryDirectory(prefix=".merge.", dir=file.parent) as folder:
            refuse_full_disk(file, 2 * size)  # for the file, and for the weights that it is written from
            _fill_from_disk(program, source, Path(folder))
            with archive_stream(file) as stream:
                save_program(program, stream)
    except (OSError, RuntimeError) as error:
        raise ArtifactError(
            f"cannot write {target}: {reason(error)}", help="check the path and the free space"
        ) from error


def _read_model(
    directory: str | os.PathLike[str], manifest: Manifest, source: RankShares, trust: bool
) -> ExportedProgram:
    """Read the model that the ranks run; the values in it, such as literals, must equal the ranks'.

    Raises:
        ArtifactError: as `read_proved_model`; or a value differs.
    """
    program = read_proved_model(directory, manifest, prepare=on_cpu, canonical=canonicalize, trust=trust)
    first = {row.name: row.holder for row in manifest.tensors}
    hollow = weightless_names(program)
    for name, value in {**program.constants, **program.state_dict}.items():
        held = first.get(name)
        if name not in hollow and held in source.tensors and not same_bits(value.detach(), source.read(held)):
            raise ArtifactError(
                f"{os.fspath(directory)}: {name!r} in {MODEL} is not what the ranks hold",
                help="copy the artifact again, or convert the model again",
            )
    return program


def _persistent(manifest: Manifest, program: ExportedProgram) -> dict[str, str]:
    """Return the first persistent name of each tensor -> the ranks' name for it."""
    first: dict[str, str] = {}
    for row in manifest.tensors:
        if row.name in program.state_dict and row.holder not in first.values():
            first[row.name] = row.holder
    return first


def _refuse_inside(directory: str | os.PathLike[str], target: Path) -> None:
    if Path(os.path.realpath(target)).is_relative_to(os.path.realpath(directory)) and not os.path.samefile(
        directory, target if os.path.exists(target) else os.curdir
    ):
        raise ArtifactError(
            f"{target} is inside {os.fspath(directory)}, which it is made from", help="choose another path"
        )


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
