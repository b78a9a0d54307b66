"""Convert an artifact's weights to DTensors, for torch.distributed.checkpoint and fine-tuning tools, and back."""

from __future__ import annotations

import contextlib
import hashlib
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from tpcompiler.artifact.program import ArtifactProgram
from tpcompiler.checkpoint.leaves import entries_of, leaves_of, shardings_of, torch_placements
from tpcompiler.checkpoint.ranks import RankShares
from tpcompiler.errors import ArtifactError, LaunchError, MeshError, TpCompilerWarning, explaining
from tpcompiler.ir.local import local_strides
from tpcompiler.ir.placements import format_placement
from tpcompiler.ir.shares import cut, mesh_of
from tpcompiler.runtime.agree import WAIT, agreeing
from tpcompiler.runtime.artifact import Manifest, say_files, weights_file
from tpcompiler.runtime.program_files import ProgramFiles
from tpcompiler.runtime.target import refuse_full_disk
from tpcompiler.runtime.weights import write_weights

SHOWN = 3


def as_dtensors(program: ArtifactProgram, mesh: DeviceMesh) -> dict[str, Any]:
    """Return a program's parameters and persistent buffers as DTensors (`ParallelProgram.state_dict`).

    Raises:
        ArtifactError: there are no weights, or a file is damaged.
        MeshError: the mesh has other sizes.
    """
    manifest = program.manifest
    rank = _rank_in(mesh, manifest)
    shardings, own = shardings_of(manifest), mesh_of(manifest)
    stored = {row.name: row for row in manifest.tensors if row.kind != "constant_tensor" and row.persistent}
    state: dict[str, Any] = {}
    whole = []
    for name, row in stored.items():
        first = row.holder
        if first in state:
            state[name] = state[first]
            continue
        placements = torch_placements(shardings[first], row.shape, own)
        if placements is None:
            whole.append(first)
            local, placements = program.read(first), [Replicate()] * mesh.ndim
        else:
            local = program.share(first, rank)
        shape = torch.Size(row.shape)
        state[name] = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=shape, stride=tuple(local_strides(local, shape))
        )
    if whole:
        more = f" and {len(whole) - SHOWN} more" if len(whole) > SHOWN else ""
        warnings.warn(
            f"whole on every rank, because DTensor cannot express their sharding: {', '.join(whole[:SHOWN])}{more}",
            TpCompilerWarning,
            stacklevel=2,
        )
    return state


def write_dtensors(files: ProgramFiles, state: Mapping[str, Any]) -> None:
    """Write weights back into a program's files, each rank its own (`ParallelProgram.load_state_dict`).

    Raises:
        ArtifactError, MeshError: as `ParallelProgram.load_state_dict`, on all ranks; the artifact stays unchanged.
    """
    manifest, path = files.manifest, files.folder
    mesh, rank = mesh_of(manifest), dist.get_rank()
    if dist.get_world_size() != mesh.world_size:
        raise MeshError(
            f"the artifact has {mesh.world_size} ranks, this world has {dist.get_world_size()}",
            help=f"start {mesh.world_size} processes, or reshard the artifact",
        )
    with _in_agreement() as mine:  # before the collectives below, which would hang
        _refuse_misfit(manifest, state, path)
        mine.update({repr(name): _form(value) for name, value in state.items()})
    source, shardings = RankShares(files), shardings_of(manifest)
    tied = {row.name: row.holder for row in manifest.tensors}
    given: dict[str, list[str]] = {}
    for name in sorted(state):
        given.setdefault(tied[name], []).append(name)

    numbers = {name: torch.tensor([rows[rank]]) for name, rows in manifest.rank_numbers.items()}
    new, entries = path / f".{weights_file(rank)}.part", entries_of(manifest, rank)
    values, digests = {}, {}
    for entry in entries:  # in one order on all ranks, which join each tensor together
        for name in given.get(entry.name, ()):
            whole = _whole(state[name])
            digests[name] = _digest(whole)
            values[entry.name] = cut(whole, shardings[entry.name], mesh, rank).clone()
    with _in_agreement() as mine:
        for first, *names in given.values():
            if other := next((name for name in names if digests[name] != digests[first]), None):
                raise ArtifactError(
                    f"{first!r} and {other!r} have different values, and the artifact ties them",
                    help="give one of them",
                )
        mine.update({f"the content of {name!r}": f"SHA-256 {digest[:12]}.." for name, digest in digests.items()})
    hashes: list[Any] = [None] * mesh.world_size
    try:
        with _in_agreement():
            refuse_full_disk(new, sum(entry.nbytes for entry in entries))
            own, names = {**numbers, **values}, [entry.name for entry in entries]
            hash = write_weights(new, entries, (own[n] if n in own else source.share(n, rank) for n in names))
    except ArtifactError:
        new.unlink(missing_ok=True)
        raise
    dist.all_gather_object(hashes, hash)
    os.replace(new, path / weights_file(rank))
    dist.barrier()
    if rank == 0:
        say_files(path, manifest, {weights_file(at): each for at, each in enumerate(hashes)})
    dist.barrier()


def _rank_in(mesh: DeviceMesh, manifest: Manifest) -> int:
    sizes = tuple(manifest.degrees.values())
    if tuple(mesh.mesh.shape) != sizes or mesh.mesh.flatten().tolist() != list(range(manifest.world_size)):
        raise MeshError(
            f"the artifact is for the mesh {manifest.mesh}, this one is {mesh.mesh.tolist()}",
            help=f"give init_device_mesh({manifest.device_type!r}, {sizes})",
        )
    return int(mesh.get_rank())


@contextlib.contextmanager
def _in_agreement() -> Iterator[dict[str, Any]]:
    """Raise ArtifactError on all ranks if the block fails on one, or if ranks put other facts in the dict.

    A file that cannot be written is an ArtifactError too.
    """
    problem = f"cannot write the weights of rank {dist.get_rank()}"
    try:
        with agreeing(WAIT) as mine, explaining(problem, "check the free space"):
            yield mine
    except LaunchError as error:
        raise ArtifactError(error.message, help=error.help) from error


def _whole(value: torch.Tensor) -> torch.Tensor:
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    return whole.detach().cpu()


def _digest(value: torch.Tensor) -> str:
    """Hash a tensor's bits, so that NaN equals itself."""
    data = value.contiguous().view(-1).view(torch.uint8).numpy().data
    return hashlib.sha256(data).hexdigest()


def _form(value: torch.Tensor) -> str:
    if not isinstance(value, DTensor):
        return "a whole tensor"
    placements = ", ".join(map(format_placement, value.placements))
    return f"a DTensor {placements} over {value.device_mesh.mesh.tolist()}"


def _refuse_misfit(manifest: Manifest, state: Mapping[str, Any], path: Path) -> None:
    """Raise ArtifactError for weights that are not the artifact's, or that its layout cannot take."""
    if manifest.layout == "ranks":
        raise ArtifactError(
            f"{path} has self-contained files, whose weights cannot be replaced",
            help='save it with layout="shared", or reshard it',
        )
    elsewhere = {row.name: row.stored_in for row in manifest.tensors if row.stored_in is not None}
    leaves = {name: leaf for leaf in leaves_of(manifest) for name in (leaf.name, *leaf.aliases)}
    for name, value in state.items():
        if program := elsewhere.get(name):
            raise ArtifactError(f"{name!r} is stored in the files of {program!r}", help=f"give {path.parent / program}")
        if name not in leaves:
            raise ArtifactError(f"{path} has no weight {name!r}", help="give the names of its manifest")
        have, want = (value.dtype, tuple(value.shape)), (leaves[name].dtype, leaves[name].shape)
        if have != want:
            raise ArtifactError(
                f"{name!r} is {have[0]} {list(have[1])}, {path} has {want[0]} {list(want[1])}",
                help="give the weights of the same model",
            )
