"""Memory that the GPUs of a group map from each other, for reductions that run in it (docs/gpu.md)."""

from __future__ import annotations

import torch
from torch.export import ExportedProgram

from tpcompiler._torch import map_symmetric
from tpcompiler.errors import LaunchError, option, reason
from tpcompiler.runtime.artifact import Manifest


def map_buffers(program: ExportedProgram, manifest: Manifest, device: torch.device) -> None:
    """Replace the constants that the manifest lists as symmetric memory, in place.

    All ranks of a group must do so at the same time.

    Raises:
        LaunchError: GPUs cannot map each other's memory.
    """
    for name, group in manifest.symm_mem.items():
        value = program.constants[name]
        try:
            program.constants[name] = map_symmetric(value.shape, value.dtype, device, group)
        except RuntimeError as error:
            line = reason(error)
            raise LaunchError(
                f"the GPUs of the group {group!r} cannot map each other's memory: {line}",
                help="run its ranks on one machine whose GPUs are linked (NVLink), or convert with "
                + option("--collectives nccl", 'collectives="nccl"'),
            ) from error
