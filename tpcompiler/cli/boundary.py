"""Cut whole inputs into ranks' shares, and join ranks' outputs, for `run`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from tpcompiler.errors import InputsError
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.shares import cut, join, row_sharding
from tpcompiler.runtime.artifact import Manifest
from tpcompiler.runtime.records import is_whole


def cut_inputs(
    tensors: Mapping[str, torch.Tensor], manifest: Manifest, rank: int, where: str
) -> dict[str, torch.Tensor]:
    """Return a rank's shares of whole inputs; `where` names their file in errors.

    Raises:
        InputsError: a tensor with another shape than the whole input, or a dynamic size that ranks do not divide.
    """
    mesh, shares = Mesh.of(manifest.mesh, manifest.factors), dict(tensors)
    for row in manifest.inputs:
        if is_whole(row.sharding) or row.name not in tensors:
            continue
        value, sharding, shape = tensors[row.name], row_sharding(row, mesh), row.shape
        if value.ndim != len(shape) or any(
            isinstance(size, int) and size != got for size, got in zip(shape, value.shape, strict=True)
        ):
            whole = ", ".join(map(str, shape))
            raise InputsError(
                f"{where}: input {row.name!r} is {list(value.shape)}, and the whole is [{whole}]",
                help="give the whole tensor: each rank takes its share",
            )
        for dim, by in enumerate(sharding.dims):
            if not isinstance(shape[dim], int) and by.axes and value.shape[dim] % (pieces := mesh.size(by.axes)):
                raise InputsError(
                    f"{where}: dim {dim} of input {row.name!r} is {value.shape[dim]}, which {pieces} ranks share",
                    help=f"give a multiple of {pieces}",
                )
        shares[row.name] = cut(value, sharding, mesh, rank).contiguous()
    return shares


def join_outputs(named: Mapping[str, torch.Tensor], manifest: Manifest) -> dict[str, torch.Tensor]:
    """Gather the whole outputs on rank 0; other ranks return their shares. Every rank must call it."""
    mesh, whole = Mesh.of(manifest.mesh, manifest.factors), dict(named)
    for row in manifest.outputs:
        if is_whole(row.sharding):
            continue
        parts: list[Any] = [None] * mesh.world_size
        dist.all_gather_object(parts, named[row.name].cpu())
        sharding = row_sharding(row, mesh)
        local = zip(row.shape, sharding.dims, parts[0].shape, strict=True)
        shape = [size if isinstance(size, int) else own * mesh.size(by.axes) for size, by, own in local]
        whole[row.name] = join(parts, sharding, mesh, shape)[0]
    return whole
