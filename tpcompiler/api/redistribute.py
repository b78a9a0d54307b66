"""Change how ranks hold a tensor of a script, with a gradient, as the compiler does inside of programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Placement, Replicate
from torch.export import export

from tpcompiler._torch import FakeTensorMode
from tpcompiler.api import parallelize
from tpcompiler.errors import ShardingError, UnsupportedError
from tpcompiler.ir.mesh import Mesh, MeshLike
from tpcompiler.ir.placements import PlacementSpec, read_spec
from tpcompiler.ir.sharding import Sharding
from tpcompiler.runtime.agree import WAIT, agreeing
from tpcompiler.runtime.world import join_world, register_groups

Given = str | Placement | Mapping[str, str | Placement]
Change = Callable[[torch.Tensor], torch.Tensor]


def redistribute(
    x: torch.Tensor,
    mesh: MeshLike,
    source: Given,
    target: Given,
    *,
    shape: Sequence[int] | None = None,
    gradient: tuple[Given, Given] | None = None,
) -> torch.Tensor:
    """Change the placements of a tensor over a mesh; every rank of the world calls this with its part.

    The collectives are those that `parallelize` inserts for this change. The backward changes the gradient of the
    result to that of `x`. By default a gradient has the placements of its tensor, and is whole for a pending sum, as
    every term has the same one. Megatron's pair around a block of layers has other ones: before the block, from "R" to
    "R" with `gradient=("P(sum)", "R")`, since each rank knows one term of the gradient; behind it, from "P(sum)" to
    "R" with the default.

    Args:
        x: this rank's part, in `source`.
        mesh: the degree of one axis `tp`, or `{axis: degree}`, over all ranks of the world.
        source: placements, such as "S(0)", "P(sum)" or `{"dp": "S(0)", "tp": "R"}`, as in `inputs` of `parallelize`.
        target: placements of the result.
        shape: that of the whole tensor. By default the parts are equal.
        gradient: the placements in which the gradient of the result arrives, and those of the gradient of `x`.

    Returns:
        This rank's part of the same tensor in `target`. It shares no memory with `x`.

    Raises:
        MeshError, PlanError, ShardingError: no such mesh, placement or dim; `x` is not this rank's part of `shape`.
        UnsupportedError: `x` needs a gradient, and a pending reduction is no sum.
        LaunchError: this process is in no group, the group has another size than the mesh, or ranks ask for different
            changes, or of tensors of different shapes.
    """
    axes = Mesh.of(mesh)
    specs = [read_spec(source, "source="), read_spec(target, "target=")]
    here, there = (Sharding.of(spec, axes, x.ndim, "x") for spec in specs)
    if shape is None and axes.is_unequal(here.cut_axes):
        raise ShardingError(f"the parts of x in {here.text(axes)} are unequal on {axes}", help="give the whole shape=")
    if shape is None:
        shape = [size * axes.size(cut.axes) for size, cut in zip(x.shape, here.dims, strict=True)]
    if x.requires_grad and (ops := {op for _, op in (*here.partial, *there.partial)} - {"sum"}):
        raise UnsupportedError(
            f"no gradient passes through a pending {min(ops)}",
            help="detach x, or let the ranks hold terms of a sum, P(sum)",
        )
    forth = _change(tuple(shape), x.dtype, x.device.type, axes, *map(_frozen, specs))
    part = here.local_shape(shape, axes, axes.coordinate(dist.get_rank()))
    if tuple(part) != x.shape:
        raise ShardingError(
            f"rank {dist.get_rank()} gives {list(x.shape)}, and its part of {list(shape)} in {here.text(axes)} is "
            f"{list(part)}",
            help="give the shape of the whole tensor: shape=",
        )
    if not x.requires_grad:
        return forth(x)
    arrives, leaves = gradient or (_gradient_of(specs[1]), _gradient_of(specs[0]))
    back = [_frozen(read_spec(given, "gradient=")) for given in (arrives, leaves)]
    backward = _change(tuple(shape), x.dtype, x.device.type, axes, *back)
    changed: torch.Tensor = _Redistribute.apply(x, forth, backward)  # type: ignore[no-untyped-call]
    return changed


class _Same(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone()


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forth: Change, back: Change) -> torch.Tensor:
        ctx.back = back
        return forth(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.back(gradient.contiguous()), None, None


Frozen = Placement | tuple[tuple[str, Placement], ...]


def _frozen(spec: PlacementSpec) -> Frozen:
    return spec if isinstance(spec, Placement) else tuple(spec.items())


def _gradient_of(spec: PlacementSpec) -> Any:
    """Return the placements of the gradient of a tensor: every term of a sum has that of the sum."""
    if isinstance(spec, Placement):
        return Replicate() if spec.is_partial() else spec
    return {axis: _gradient_of(placement) for axis, placement in spec.items()}


@lru_cache(256)
def _change(
    shape: tuple[int, ...], dtype: torch.dtype, device: str, mesh: Mesh, source: Frozen, target: Frozen
) -> Change:
    """Convert the program that returns its input, and join its groups.

    Raises:
        LaunchError: as `redistribute`, or the ranks have not all called it with the same whole shape and change.
    """
    with FakeTensorMode():
        exported = export(_Same(), (torch.empty(shape, dtype=dtype, device=device),))
    given, made = (dict(spec) if isinstance(spec, tuple) else spec for spec in (source, target))
    made_for = parallelize(exported, mesh, {}, inputs=[given], outputs=[made], device_type=device)
    manifest = made_for.manifest()
    join_world(manifest, manifest.world_size, WAIT)
    with agreeing(WAIT) as mine:
        mine["the tensor"] = f"{dtype} {list(shape)}"
        mine["the change"] = f"from {manifest.inputs[0].sharding} to {manifest.outputs[0].sharding}"
        register_groups(manifest, WAIT)
    module = made_for.rank_program(dist.get_rank()).module()
    return lambda x: module(x)
