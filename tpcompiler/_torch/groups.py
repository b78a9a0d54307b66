"""Process groups and the memory that they share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group, _resolve_process_group, _unregister_process_group
from torch.distributed import _symmetric_memory
from torch.testing._internal.distributed import fake_pg

FAKE_GROUP: Any = vars(fake_pg)["FakeProcessGroup"]


def register_group(name: str, group: dist.ProcessGroup) -> None:
    """Make graphs that name `name` use `group`."""
    _register_process_group(cast(Any, name), group)


def resolve_group(name: str) -> dist.ProcessGroup:
    return _resolve_process_group(cast(Any, name))


def default_store() -> Any:
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def meet_ranks(host: str, port: int, rank: int, size: int, timeout: timedelta, fact: bytes) -> tuple[Any, list[bytes]]:
    """Meet the ranks of several worlds at rank 0's address; return the store, and the fact that each rank brings.

    Raises:
        RuntimeError: not all ranks arrived in time, or the address is in use.
    """
    c10d: Any = dist  # its stubs omit the stores
    store = c10d.TCPStore(host, port, size, rank == 0, timeout, wait_for_workers=False)
    store.set(f"rank/{rank}", fact)
    return store, [bytes(store.get(f"rank/{each}")) for each in range(size)]


def group_over(store: Any, rank: int, size: int, timeout: timedelta, backend: str) -> Any:
    """Return a process group of the ranks that met at a store; torch's own groups do not know of it.

    Raises:
        RuntimeError: not all ranks arrived in time, or the ranks cannot reach each other.
    """
    c10d: Any = dist
    store = c10d.PrefixStore("group", store)
    if backend == "nccl":
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return c10d.ProcessGroupNCCL(store, rank, size, options)
    return c10d.ProcessGroupGloo(store, rank, size, timeout)


def group_is_registered(name: str) -> bool:
    try:
        resolve_group(name)
    except RuntimeError:
        return False
    return True


@contextlib.contextmanager
def fake_group(name: str, rank: int, size: int, device_type: str) -> Iterator[None]:
    """Register a process group that communicates with nobody, under a private name, for the time of a trace.

    It never becomes the default group, so a caller's own process group keeps its state.
    """
    c10d: Any = dist  # its stubs omit the stores
    group = c10d.ProcessGroup(c10d.PrefixStore(name, c10d.HashStore()), rank, size)
    create = getattr(FAKE_GROUP, "_create_internal", FAKE_GROUP)
    group._register_backend(torch.device(device_type), dist.ProcessGroup.BackendType.CUSTOM, create(rank, size))
    group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    group._set_group_name(name)
    register_group(name, group)
    try:
        yield
    finally:
        _unregister_process_group(cast(Any, name))


def map_symmetric(shape: Sequence[int], dtype: torch.dtype, device: torch.device, group: str) -> torch.Tensor:
    """Return zeros in memory that all ranks of a group map. All ranks must call this.

    Raises:
        RuntimeError: the devices do not support it.
    """
    memory = _symmetric_memory.empty(tuple(shape), dtype=dtype, device=device).zero_()
    _symmetric_memory.rendezvous(memory, resolve_group(group))
    return memory
