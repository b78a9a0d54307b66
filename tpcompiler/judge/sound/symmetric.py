"""Check that `load` exchanges exactly those constants for symmetric memory that reductions use."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tpcompiler.judge.sound.unsound import Unsound
from tpcompiler.judge.sound.written import WrittenRank
from tpcompiler.runtime.artifact import Manifest


def check_symmetric(ranks: Sequence[WrittenRank], manifest: Manifest) -> None:
    """Check that every rank uses the same memory, of the group in the manifest, and allocates the same amount.

    Raises:
        Unsound: memory is mapped for another group, is a tensor of the model, or differs between ranks.
    """
    for rank, each in enumerate(ranks):
        groups = {name: room.group for name, room in each.rooms.items()}
        if groups != manifest.symm_mem:
            raise Unsound(
                None,
                f"rank {rank} reduces over the symmetric memory {groups}, and the manifest says {manifest.symm_mem}",
            )
        for name, room in each.rooms.items():
            held = each.state.get(name)
            if not isinstance(held, torch.Tensor) or (tuple(held.shape), held.dtype) != room[1:]:
                raise Unsound(None, f"rank {rank} does not hold the symmetric memory {name!r} that its program takes")
            if room != (first := ranks[0].rooms[name]):
                raise Unsound(None, f"the symmetric memory {name!r} is {room} on rank {rank}, and {first} on rank 0")
