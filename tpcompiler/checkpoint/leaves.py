"""The tensors in an artifact's ranks, seen as a checkpoint: whole, each once."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch
from torch.distributed.tensor import Placement

from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.placements import format_placement
from tpcompiler.ir.sharding import Sharding
from tpcompiler.ir.shares import mesh_of, row_sharding
from tpcompiler.runtime.artifact import Manifest
from tpcompiler.runtime.records import TensorRecord
from tpcompiler.runtime.weights import TensorEntry, dtype_of, lay_out


def wanted_leaves(manifest: Manifest, values: Collection[str]) -> list[TensorEntry]:
    """Return the tensors that a checkpoint must have: those without a value, and persistent buffers.

    As in torch, a state dict contains persistent buffers, such as the bias of a router or running statistics, whose
    values in a trained model differ from the constructor's.
    """
    return [leaf for leaf in leaves_of(manifest) if leaf.name not in values or leaf.is_buffer]


def leaves_of(manifest: Manifest) -> list[TensorEntry]:
    """Return the tensors in the files of a program's ranks, except those stored by another program."""
    names: dict[str, list[str]] = {}
    for row in manifest.tensors:
        if row.tied_to is not None:
            names.setdefault(row.tied_to, []).append(row.name)
    return [
        TensorEntry(
            row.name,
            dtype_of(row.dtype),
            tuple(row.shape),
            tuple(names.get(row.name, ())),
            is_buffer=row.kind == "buffer" and row.persistent,
        )
        for row in manifest.tensors
        if row.is_own
    ]


def held_per_rank(manifest: Manifest) -> list[int]:
    """Bytes of parameters, buffers and constants of every rank; a tied tensor counts once.

    Raises:
        ArtifactError: a tensor cannot have its sharding.
    """
    mesh = mesh_of(manifest)
    held = [bytes_per_rank(row, mesh) for row in manifest.tensors if row.tied_to is None]
    return [sum(own) for own in zip(*held, strict=True)] if held else [0] * mesh.world_size


def bytes_per_rank(row: TensorRecord, mesh: Mesh) -> list[int]:
    """Bytes of a tensor on every rank.

    Raises:
        ArtifactError: it cannot have its sharding.
    """
    sharding, itemsize = row_sharding(row, mesh), dtype_of(row.dtype).itemsize
    ranks = map(mesh.coordinate, range(mesh.world_size))
    return [math.prod(sharding.local_shape(row.shape, mesh, place)) * itemsize for place in ranks]


def shardings_of(manifest: Manifest) -> dict[str, Sharding]:
    """Return the sharding of each parameter, buffer and constant by name."""
    mesh = mesh_of(manifest)
    return {row.name: row_sharding(row, mesh) for row in manifest.tensors}


def placed_shardings(manifest: Manifest) -> dict[str, Sharding]:
    """Return the shardings of inputs, leaves and outputs (`output NAME`) by name."""
    mesh = mesh_of(manifest)
    return {name: row_sharding(row, mesh) for name, row in manifest.placed()}


def entries_of(manifest: Manifest, rank: int) -> list[TensorEntry]:
    """Return the entries of a rank's weights file, in order."""
    shardings, mesh = shardings_of(manifest), mesh_of(manifest)
    here = mesh.coordinate(rank)
    own = [
        TensorEntry(leaf.name, leaf.dtype, tuple(map(int, shardings[leaf.name].local_shape(leaf.shape, mesh, here))))
        for leaf in leaves_of(manifest)
    ]
    numbers = manifest.rank_numbers.items()
    return lay_out([*own, *(TensorEntry(name, torch.int64, (1, len(rows[rank]))) for name, rows in numbers)])


def torch_placements(sharding: Sharding, shape: Sequence[int], mesh: Mesh) -> Sequence[Placement] | None:
    """Return torch's placements for a sharding; None if they cannot express it."""
    if mesh.is_unequal(sharding.cut_axes):
        return None
    if mesh.factors:
        joined, whole = sharding.join_factors(mesh)
        is_even = all(by.is_even(size, mesh) for by, size in zip(sharding.dims, shape, strict=True))
        if whole.factors or not is_even:  # nested factors deal uneven shares in another way than `torch.chunk`
            return None
        sharding, mesh = joined, whole
    placements = sharding.placements(mesh)
    texts = [format_placement(each) for each in placements]
    if sharding.partial or sharding.text(mesh) != (texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]"):
        return None
    return placements
