"""Collectives and their bytes: the payload that the call names, and the ring wire bytes per rank.

Ring algorithms as in Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH"
(2005): with n ranks and a payload of M bytes, an all_reduce sends 2 (n - 1) / n M per rank; an all_gather (M = the
gathered bytes), a reduce_scatter (M = the reduced bytes) and an all_to_all (M = a rank's bytes) send (n - 1) / n M.
"""

from __future__ import annotations

from typing import get_args

from tpcompiler.runtime.records import CollectiveKind

KIND_OF: dict[str, CollectiveKind] = {  # torch's op -> our kind
    "all_reduce": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}
KINDS: tuple[CollectiveKind, ...] = get_args(CollectiveKind)


def wire_bytes(kind: str, payload: int, group_size: int) -> int:
    """Return the bytes that each rank sends on a ring of `group_size` ranks."""
    share = payload * (group_size - 1) / group_size
    return round(2 * share if kind == "all_reduce" else share)
