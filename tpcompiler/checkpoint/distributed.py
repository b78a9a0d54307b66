"""A module in training, and its optimizer, as tensors for torch.distributed.checkpoint."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tpcompiler._torch.boxes import Box, BoxedTensor
from tpcompiler.checkpoint.leaves import torch_placements
from tpcompiler.errors import ArtifactError
from tpcompiler.ir.local import local_strides
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.sharding import Sharding
from tpcompiler.ir.shares import row_sharding
from tpcompiler.runtime.records import Manifest, TensorRecord
from tpcompiler.runtime.world import own_rank


class DistributedState:
    """The state of one module, in the memory of the rank's own tensors: a checkpoint is read into the module.

    A tensor is a DTensor, or a `BoxedTensor` if DTensor cannot express its sharding.
    """

    def __init__(self, module: torch.nn.Module, manifest: Manifest, trained: Collection[str]) -> None:
        """`trained`: the parameters that have a gradient."""
        self.module, self.manifest, self.trained = module, manifest, trained
        self.mesh: DeviceMesh | None = None

    def __call__(self, optimizer: torch.optim.Optimizer | None = None) -> dict[str, dict[str, Any]]:
        """Return `{"model": {name: tensor}, "optimizer": {"name.key": tensor}}`; all ranks must call it.

        An optimizer that has made no step gets state of zeros, into which a checkpoint can be read. If none is, its
        first step is as if it had not been asked.

        Raises:
            ArtifactError: a parameter is pending.
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

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        named = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        for row in self.manifest.tensors:
            if row.name in named and row.tied_to is None and row.persistent:
                yield row.name, self._distributed(row, named[row.name])

    def _of_optimizer(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
        rows = {row.name: row for row in self.manifest.tensors}
        names: dict[torch.Tensor, str] = {value: name for name, value in self.module.named_parameters()}
        if not optimizer.state:
            _make_state(optimizer, [self.module.get_parameter(name) for name in self.trained])
        for value, own in optimizer.state.items():
            for key, each in own.items():
                is_share = isinstance(each, torch.Tensor) and each.shape == value.shape and each.ndim > 0
                yield f"{names[value]}.{key}", self._distributed(rows[names[value]], each) if is_share else each

    def _distributed(self, row: TensorRecord, local: torch.Tensor) -> torch.Tensor:
        mesh = Mesh.of(self.manifest.mesh, self.manifest.factors)
        sharding, shape = row_sharding(row, mesh), torch.Size(row.shape)
        if sharding.partial:
            raise ArtifactError(
                f"{row.name!r} is sharded as {row.sharding}: it is the sum of what the ranks hold",
                help="give it another style in the plan, such as replicate",
            )
        placements = torch_placements(sharding, row.shape, mesh)
        if placements is None:
            return _in_boxes(local.detach(), sharding, shape, mesh, own_rank(self.manifest))
        stride = tuple(local_strides(local, shape))
        assert self.mesh is not None
        return DTensor.from_local(local.detach(), self.mesh, placements, run_check=False, shape=shape, stride=stride)


def _in_boxes(local: torch.Tensor, sharding: Sharding, shape: torch.Size, mesh: Mesh, rank: int) -> BoxedTensor:
    """Return a share that DTensor cannot express, as boxes which are equal or disjoint on all ranks."""
    sides = []  # by dim: start in the whole, start in the share, length
    for by, size in zip(sharding.dims, shape, strict=True):
        runs = [by.runs(size, mesh, mesh.coordinate(each)) for each in range(mesh.world_size)]
        ends = sorted({end for own in runs for run in own for end in (run.start, run.stop)})
        own, at = [], 0
        for run in runs[rank]:
            for start, stop in itertools.pairwise(end for end in ends if run.start <= end <= run.stop):
                own.append((start, at, stop - start))
                at += stop - start
        sides.append(own)
    boxes = []
    for each in itertools.product(*sides):
        held = local[tuple(slice(at, at + length) for _, at, length in each)]
        boxes.append(Box(tuple(start for start, *_ in each), held))
    return BoxedTensor.of(boxes, local, shape)


def _make_state(optimizer: torch.optim.Optimizer, trained: Collection[torch.Tensor]) -> None:
    """Make the tensors in which an optimizer keeps its state for parameters with a gradient, all of zeros.

    Zeros are not how every optimizer begins (weight decay, dampening, step sizes), so the first step takes them away
    again, unless a checkpoint was read into them. Parameters and gradients are as before.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    gradients = [(each, each.grad) for group in optimizer.param_groups for each in group["params"]]
    held = {id(each) for each in trained}
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
        for each in group["params"]:
            each.grad = torch.zeros_like(each) if id(each) in held else None
    optimizer.step()
    for each, gradient in gradients:
        each.grad = gradient
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for each in _state_tensors(optimizer):
        each.zero_()

    def begin(*_: Any) -> None:
        hook.remove()
        if not any(each.any() for each in _state_tensors(optimizer)):
            optimizer.state.clear()

    hook = optimizer.register_step_pre_hook(begin)


def _state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for own in optimizer.state.values():
        yield from (each for each in own.values() if isinstance(each, torch.Tensor))
