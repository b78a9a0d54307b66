"""torch's own changes of placements, traced without a process group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

# Private, and only in tests: nothing public redistributes a local tensor without running it.
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._redistribute import redistribute_local_tensor

from tpcompiler._torch import FakeTensorMode, fake_group, trace_ops


def traced_mesh(degrees: Sequence[int], groups: Sequence[str]) -> DeviceMesh:
    """A mesh over registered groups; it neither needs nor creates a default group."""
    ranks = torch.arange(torch.Size(degrees).numel()).view(*degrees)
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=tuple(groups), _init_backend=False, _rank=0)
    mesh._dim_group_names = cast(Any, list(groups))
    return mesh


def torchs_change(shape: Sequence[int], source: Placement, target: Placement, degree: int, group: str) -> fx.Graph:
    """What the first rank runs for an even change on one axis."""
    meta = TensorMeta(torch.Size(shape), torch.empty(shape, device="meta").stride(), torch.float32)
    local = [size // degree if source.is_shard(dim) else size for dim, size in enumerate(shape)]
    with fake_group(group, 0, degree, "cpu"):
        mesh = traced_mesh([degree], [group])
        ends = [DTensorSpec(mesh, (placement,), meta) for placement in (source, target)]
        with FakeTensorMode(), torch.no_grad():
            return trace_ops(lambda x: redistribute_local_tensor(x, *ends), torch.empty(local))
