"""Cut whole inputs into ranks' shares, and join ranks' outputs, for `run`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from tpcompiler.checkpoint.hosted import hosts_of
from tpcompiler.errors import InputsError
from tpcompiler.ir.hosting import join_tensors, split_tensor
from tpcompiler.ir.shares import cut, join, row_sharding
from tpcompiler.runtime.artifact import Manifest
from tpcompiler.runtime.records import is_whole


def cut_inputs(
    tensors: Mapping[str, torch.Tensor], manifest: Manifest, process: int, where: str, processes: int | None = None
) -> dict[str, torch.Tensor]:
    """Return a process's shares of whole inputs: those of the ranks that it runs, in one.

    Args:
        where: the name of their file, for errors.
        processes: their number; one for each rank by default.

    Raises:
        InputsError: a tensor with another shape than the whole input, or a dynamic size that ranks do not divide.
    """
    hosts, shares = hosts_of(manifest, min(processes or manifest.world_size, manifest.world_size)), dict(tensors)
    mesh = hosts.mesh
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
        own = [cut(value, sharding, mesh, rank) for rank in hosts.ranks(process)]
        shares[row.name] = join_tensors(own, sharding, hosts).contiguous()
    return shares


def join_outputs(named: Mapping[str, torch.Tensor], manifest: Manifest) -> dict[str, torch.Tensor]:
    """Gather the whole outputs on rank 0; other ranks return their shares. Every rank must call it."""
    hosts, whole = hosts_of(manifest, min(dist.get_world_size(), manifest.world_size)), dict(named)
    mesh = hosts.mesh
    for row in manifest.outputs:
        if is_whole(row.sharding):
            continue
        sharding = row_sharding(row, mesh)
        shares: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(shares, named[row.name].cpu())
        parts = [
            part
            for process, value in enumerate(shares[: hosts.processes])
            for part in split_tensor(value, sharding, hosts, process, row.shape)
        ]
        local = zip(row.shape, sharding.dims, parts[0].shape, strict=True)
        shape = [size if isinstance(size, int) else own * mesh.size(by.axes) for size, by, own in local]
        whole[row.name] = join(parts, sharding, mesh, shape)[0]
    return whole
