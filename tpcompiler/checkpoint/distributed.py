"""A module in training, and its optimizer, as DTensors for torch.distributed.checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tpcompiler.checkpoint.leaves import torch_placements
from tpcompiler.errors import ArtifactError
from tpcompiler.ir.local import local_strides
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.shares import row_sharding
from tpcompiler.runtime.records import Manifest, TensorRecord


class DistributedState:
    """The state of one module. A DTensor has the memory of the rank's tensor: a checkpoint is read into the module."""

    def __init__(self, module: torch.nn.Module, manifest: Manifest) -> None:
        self.module, self.manifest = module, manifest
        self.mesh: DeviceMesh | None = None

    def __call__(self, optimizer: torch.optim.Optimizer | None = None) -> dict[str, dict[str, Any]]:
        """Return `{"model": {name: tensor}, "optimizer": {"name.key": tensor}}`; all ranks must call it.

        An optimizer that has made no step gets its state first, by a step with a rate of 0.

        Raises:
            ArtifactError: DTensor cannot express a sharding.
        """
        if self.mesh is None:
            degrees = self.manifest.degrees
            ranks = torch.arange(self.manifest.world_size).view(*degrees.values())
            device = next(self.module.parameters()).device.type
            self.mesh = DeviceMesh(device, ranks, mesh_dim_names=tuple(degrees))
        state: dict[str, dict[str, Any]] = {"model": dict(self._tensors())}
        if optimizer is not None:
            state["optimizer"] = dict(self._of_optimizer(optimizer))
        return state

    def _tensors(self) -> Iterator[tuple[str, DTensor]]:
        named = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        for row in self.manifest.tensors:
            if row.name in named and row.tied_to is None and row.persistent:
                yield row.name, self._distributed(row, named[row.name])

    def _of_optimizer(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
        rows = {row.name: row for row in self.manifest.tensors}
        names: dict[torch.Tensor, str] = {value: name for name, value in self.module.named_parameters()}
        if not optimizer.state:
            _make_state(optimizer)
        for value, own in optimizer.state.items():
            for key, each in own.items():
                is_share = isinstance(each, torch.Tensor) and each.shape == value.shape and each.ndim > 0
                yield f"{names[value]}.{key}", self._distributed(rows[names[value]], each) if is_share else each

    def _distributed(self, row: TensorRecord, local: torch.Tensor) -> DTensor:
        mesh = Mesh.of(self.manifest.mesh, self.manifest.factors)
        placements = torch_placements(row_sharding(row, mesh), row.shape, mesh)
        if placements is None:
            raise ArtifactError(
                f"{row.name!r} is sharded as {row.sharding}, which DTensor cannot express",
                help="cut it over one axis for each dim, in equal shares",
            )
        shape = torch.Size(row.shape)
        stride = tuple(local_strides(local, shape))
        assert self.mesh is not None
        return DTensor.from_local(local.detach(), self.mesh, placements, run_check=False, shape=shape, stride=stride)


def _make_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the tensors in which an optimizer keeps its state, without a change of parameters, gradients and counts."""
    rates = [group["lr"] for group in optimizer.param_groups]
    gradients = [(each, each.grad) for group in optimizer.param_groups for each in group["params"]]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
        for each in group["params"]:
            each.grad = torch.zeros_like(each)
    optimizer.step()
    for each, gradient in gradients:
        each.grad = gradient
    for own in optimizer.state.values():
        if isinstance(step := own.get("step"), torch.Tensor):
            step.zero_()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
