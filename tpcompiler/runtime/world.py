"""The world of a rank's program: its device, its process group, the groups that the graphs name, and their end."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import sys
import warnings
import weakref
from datetime import timedelta

import torch
import torch.distributed as dist

from tpcompiler._torch import group_is_registered, register_group, resolve_group
from tpcompiler.errors import LaunchError, TpCompilerWarning, explaining, option, reason
from tpcompiler.runtime.agree import RESTART
from tpcompiler.runtime.artifact import Manifest


def own_device(manifest: Manifest, backend: str | None = None) -> torch.device:
    """Return the device of this process; for CUDA, make it the current one, because programs name no index.

    Raises:
        LaunchError: there is no GPU for this process, or gloo would have to gather on GPUs.
    """
    if manifest.device_type != "cuda":
        return torch.device(manifest.device_type)
    if not torch.cuda.is_available():
        raise LaunchError(
            "the artifact is for CUDA, and torch finds no CUDA device here",
            help=f"run it on a machine with GPUs, or convert the model again with {_device('cpu')}",
        )
    count = torch.cuda.device_count()
    has_group = dist.is_initialized()
    rank = dist.get_rank() if has_group else _number("RANK")
    local = _number("LOCAL_RANK", rank % count)
    processes = max(_number("LOCAL_WORLD_SIZE", 1), local + 1)
    # gloo's processes may share a device, and so may NCCL's that do not see each other; a caller that made a group has
    # already chosen.
    if processes > count and not has_group and backend != "gloo" and "NCCL_HOSTID" not in os.environ:
        raise LaunchError(
            f"{processes} processes on this machine, and torch finds {count} CUDA device{'s' * (count != 1)}: NCCL "
            "needs one each",
            help=f"start {count} on a machine, each of which sees all its GPUs (CUDA_VISIBLE_DEVICES)",
        )
    if "gloo" in (backend, has_group and dist.get_backend()):
        _refuse_gathers(manifest)
    device = torch.device("cuda", local % count)
    torch.cuda.set_device(device)
    return device


def _device(kind: str) -> str:
    return option(f"--device {kind}", f'device_type="{kind}"')


def _refuse_gathers(manifest: Manifest) -> None:
    """Reject all_gather on GPUs with gloo: the only collective for which torch's gloo fails there."""
    if gathers := sum(row.kind == "all_gather" for row in manifest.collectives):
        raise LaunchError(
            f"{gathers} all_gather of tensors on GPUs, which ends a process by SIGSEGV in torch's gloo",
            help="use NCCL (docs/gpu.md explains how processes share a GPU), or convert the model again with "
            + _device("cpu"),
        )


def join_world(
    manifest: Manifest,
    world: int,
    timeout: timedelta,
    backend: str | None = None,
    rank: int | None = None,
    *,
    may_host: bool = False,
) -> torch.device:
    """Check that this process's world is the one that the artifact is for, join it, and return the device.

    Args:
        world: the number of ranks of the artifact.
        rank: the rank that the caller expects this process to be.
        may_host: a process may run several ranks, so that there are fewer processes.

    Raises:
        LaunchError: as `own_device`; the environment or the world differs, or not all ranks arrived in time.
    """
    device = own_device(manifest, backend)
    release_default_group()
    _join(manifest, world, timeout, backend, may_host)
    if rank is not None and rank != dist.get_rank():
        raise LaunchError(
            f"rank {rank} was requested in the process of rank {dist.get_rank()}", help="leave rank out under torchrun"
        )
    if not may_host:
        warn_of_machines(manifest)
    return device


def _join(manifest: Manifest, world: int, timeout: timedelta, backend: str | None, may_host: bool) -> None:
    """Make the default process group from torchrun's environment, unless the caller has made one."""
    if not dist.is_initialized():
        start = f"start it with torchrun --nproc-per-node {world}"
        if missing := [name for name in ("RANK", "WORLD_SIZE") if name not in os.environ]:
            raise LaunchError(
                f"this process is in no group: {' and '.join(missing)} {'are' if missing[1:] else 'is'} not set",
                help=start,
            )
        size = _number("WORLD_SIZE")
        _refuse_world(size, world, may_host)
        if (rank := _number("RANK")) >= size:
            raise LaunchError(f"RANK is {rank} in a world of {size}", help=f"use a rank from 0 to {size - 1}")
        if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
            raise LaunchError(f"the ranks have no place to meet: {missing[0]} is not set", help=start)
        if (port := _number("MASTER_PORT")) >= 1 << 16:
            raise LaunchError(f"MASTER_PORT is {port}, and the last port is {(1 << 16) - 1}", help=start)
        backend = backend or ("nccl" if manifest.device_type == "cuda" else "gloo")
        if backend == "nccl" and manifest.device_type != "cuda":
            raise LaunchError(
                f"the artifact is for {manifest.device_type}, and NCCL sends between GPUs only",
                help=f"use the backend gloo, or convert the model again with {_device('cuda')}",
            )
        late = f"not all of {world} ranks arrived within {timeout.total_seconds():g} s"
        with explaining(late, RESTART, dist.DistError, raised=LaunchError):
            dist.init_process_group(backend, timeout=timeout)
        assert dist.group.WORLD is not None
        if backend == "gloo":
            destroy_at_exit(dist.group.WORLD)
    _refuse_world(dist.get_world_size(), world, may_host)


def _number(name: str, otherwise: int = 0) -> int:
    text = os.environ.get(name, str(otherwise))
    if not (text.isascii() and text.isdecimal()):
        raise LaunchError(f"{name} is {text!r}, which is not a number", help="start it with torchrun, which sets it")
    return int(text)


def _refuse_world(size: int, world: int, may_host: bool) -> None:
    if size != world and not (may_host and size and world % size == 0):
        number = f"a divisor of {world}" if may_host else world
        raise LaunchError(
            f"the artifact is for {world} ranks, this world has {size}",
            help=f"start it with torchrun --nproc-per-node {world}, "
            + (f"or with {number}" if may_host else f"or convert for {size}"),
        )


def own_rank(manifest: Manifest) -> int:
    """Return the rank of a program that this process runs: a program for fewer ranks than the world is copied."""
    return dist.get_rank() % manifest.world_size


def ranks_of_copy(manifest: Manifest) -> range:
    """Return the processes that run the same copy of a program, or the same stage, as this one."""
    first = dist.get_rank() - own_rank(manifest)
    return range(first, first + manifest.world_size)


def groups_here(manifest: Manifest) -> dict[str, list[list[int]]]:
    """Return a program's groups by name, with those of its copies in a larger world."""
    starts = range(0, dist.get_world_size(), manifest.world_size)
    return {
        name: [[start + rank for rank in ranks] for start in starts for ranks in groups]
        for name, groups in manifest.groups.items()
    }


def register_groups(manifest: Manifest, timeout: timedelta) -> None:
    """Register a group of this rank under every name in the manifest; reuse an equal one of another artifact.

    With gloo every group is made here, even one of all ranks, so that it can be destroyed at exit (see `leave`): the
    default group may be the caller's. With NCCL another group of all ranks would only take GPU memory.
    """
    nccl = dist.get_backend() == "nccl"
    for name, groups in groups_here(manifest).items():
        own = next(ranks for ranks in groups if dist.get_rank() in ranks)
        if not group_is_registered(name):
            # new_group requires every rank to make every group, in the same order.
            own_groups = [
                dist.group.WORLD if nccl and len(ranks) == dist.get_world_size() else dist.new_group(ranks, timeout)
                for ranks in groups
            ]
            group = own_groups[groups.index(own)]
            assert group is not None
            register_group(name, group)
            if not nccl:
                destroy_at_exit(group)
        elif (taken := dist.get_process_group_ranks(resolve_group(name))) != list(own):
            raise LaunchError(
                f"the process-group name {name!r} is that of the ranks {taken}, this artifact's of {own}",
                help="load this artifact in another process",
            )


def warn_of_machines(manifest: Manifest) -> None:
    """Warn if the last axis of the mesh, which communicates most, spans several machines.

    Ranks are numbered row by row, and torchrun numbers them machine by machine: so the last axis stays within one
    machine if its degree divides the machine's number of processes.
    """
    axis, degree = list(manifest.degrees.items())[-1]
    there = _number("LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in os.environ else 0
    if 0 < there < manifest.world_size and there % degree and dist.get_rank() == 0:
        inner = [name for name, size in manifest.degrees.items() if size > 1 and there % size == 0]
        instead = f"put {inner[-1]!r} last in --mesh" if inner else f"convert for a degree that divides {there}"
        warnings.warn(
            f"the axis {axis!r} of {degree} ranks spans several machines of {there} processes each, and every "
            f"collective over it goes between them: {instead}",
            TpCompilerWarning,
            stacklevel=4,
        )


def greet_groups(manifest: Manifest, device: torch.device, timeout: timedelta) -> None:
    """Sum one number over every group, so that ranks that cannot reach each other fail here, with the group's name.

    Raises:
        LaunchError: a group does not answer.
    """
    for name, groups in groups_here(manifest).items():
        own = next(ranks for ranks in groups if dist.get_rank() in ranks)
        ones = torch.ones(1, device=device if device.type == "cuda" else "cpu")
        try:
            dist.all_reduce(ones, group=resolve_group(name))
            answer = f"counts {ones.item():g} ranks"
        except RuntimeError as error:
            answer = reason(error)
        if answer != f"counts {len(own)} ranks":
            raise LaunchError(
                f"the group {name!r} of the ranks {own} did not answer within {timeout.total_seconds():g} s: {answer}",
                help="check that its ranks can reach each other (network, firewall, NCCL_SOCKET_IFNAME, "
                "GLOO_SOCKET_IFNAME), and restart the job",
            )


def destroy_at_exit(group: dist.ProcessGroup) -> None:
    """Destroy the group when the script ends, in any way, unless the caller has destroyed it already.

    A gloo thread releases a collective's tensors a moment after the caller has them, and takes the GIL to do so. If the
    interpreter is already shutting down, that aborts the process: "terminate called without an active exception".
    Destroying a group ends its threads, but only if nothing else refers to it: this module keeps no reference to one.
    """
    atexit.register(_destroy, weakref.ref(group))


def _destroy(reference: weakref.ref[dist.ProcessGroup]) -> None:
    group = reference()
    if group is not None:
        with contextlib.suppress(ValueError):  # the caller has destroyed it, and something still refers to it
            dist.destroy_process_group(group)


def release_default_group() -> None:
    """Import the module of torch that would keep the default group alive, before the group exists for it.

    `torch.export.load` imports `torch.distributed.nn.functional`, whose functions take the default group of that moment
    as the default of an argument. `destroy_process_group` could then not end that group's threads.
    """
    name, world = "torch.distributed.nn.functional", dist.group.WORLD
    if name in sys.modules:
        return
    dist.group.WORLD = None
    try:
        importlib.import_module(name)
    finally:
        dist.group.WORLD = world
