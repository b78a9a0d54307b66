"""Load one rank's program in a process that torchrun started."""

from __future__ import annotations

import functools
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.export import ExportedProgram

from tpcompiler._torch import group_is_registered, register_group, resolve_group
from tpcompiler.errors import ArtifactError, LaunchError
from tpcompiler.runtime.agree import RESTART, WAIT, agreeing, artifact_facts, input_facts, named_failures
from tpcompiler.runtime.artifact import Manifest, programs_in, read_manifest
from tpcompiler.runtime.backends import refuse_unsendable
from tpcompiler.runtime.beside import misfit_of
from tpcompiler.runtime.inputs import named_inputs
from tpcompiler.runtime.leave import destroy_at_exit, release_default_group
from tpcompiler.runtime.place import place_state
from tpcompiler.runtime.rank_file import AGAIN, Weights, read_rank, strides_of, taken_by


def load(
    directory: str | os.PathLike[str],
    rank: int | None = None,
    *,
    check_inputs: bool = False,
    timeout: timedelta = WAIT,
    trust: bool = False,
    weights: Weights | None = None,
) -> Any:
    """What `tpcompiler.load` does (`checkpoint/load.py`); `weights` reads a rank's where its files have none."""
    names = programs_in(directory)
    if misfit := misfit_of({name: read_manifest(Path(directory) / name) for name in names}):
        raise ArtifactError(
            f"the programs of {os.fspath(directory)} do not belong together: {misfit}", help="convert them together"
        )
    stored: dict[str, torch.Tensor] = {}
    made = {
        name: _module(*_exported(Path(directory) / name, rank, stored, timeout, trust, weights), check_inputs, timeout)
        for name in names or [""]
    }
    return made if names else made[""]


def _exported(
    directory: Path,
    rank: int | None,
    stored: dict[str, torch.Tensor],
    timeout: timedelta,
    trust: bool,
    weights: Weights | None,
) -> tuple[ExportedProgram, Manifest]:
    """This rank's program on its device; what its file leaves out is taken from `stored`, what it holds put there."""
    manifest = read_manifest(directory)
    left_out = {row["name"] for row in manifest.tensors if "stored_in" in row}
    if missing := left_out - stored.keys():
        raise ArtifactError(
            f"{os.fspath(directory)} leaves {len(missing)} tensors to the program beside it, such as {min(missing)!r}",
            help=f"load {Path(directory).parent}, which gives all of its programs",
        )
    device = _own_device(manifest)
    release_default_group()
    _join_world(manifest, timeout)
    here = dist.get_rank() if rank is None else rank
    if here != dist.get_rank():
        raise LaunchError(
            f"rank {here} was asked for in the process of rank {dist.get_rank()}", help="leave rank out under torchrun"
        )
    with agreeing(timeout) as mine:
        exported = read_rank(directory, manifest, here, trust=trust, weights=weights)
        refuse_unsendable(exported, dist.get_backend())
        mine.update(artifact_facts(manifest))
    with named_failures():
        _register_groups(manifest, timeout)
    wanted = taken_by(exported)
    for name in sorted(left_out & wanted.keys()):
        if (found := strides_of(stored[name])) != (said := strides_of(wanted[name])):
            raise ArtifactError(
                f"{os.fspath(directory)} takes {name!r} with the strides {said}, the program beside it has {found}",
                help=AGAIN,
            )
    for held in (exported.state_dict, exported.constants):
        held.update({name: stored[name] for name in held.keys() & left_out})
    place_state(exported, device)
    for row in manifest.tensors:
        name = row["name"]
        stored[name] = exported.state_dict[name] if name in exported.state_dict else exported.constants[name]
    return exported, manifest


def _module(exported: ExportedProgram, manifest: Manifest, check_inputs: bool, timeout: timedelta) -> Any:
    module = exported.module()
    run, unchecked = module.forward, check_inputs

    @functools.wraps(run)
    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal unchecked
        if unchecked:
            with agreeing(timeout) as mine:
                mine.update(input_facts(named_inputs(exported, args, kwargs), manifest))
            unchecked = False
        # A backward would run and give wrong gradients: sums over the ranks of a loss that is the same on all, and
        # parts that nothing adds up. Without a record of the forward it raises.
        with torch.no_grad(), named_failures():
            return run(*args, **kwargs)

    module.forward = forward
    module.exported_program = exported  # type: ignore[assignment]
    return module


def _own_device(manifest: Manifest) -> torch.device:
    """The device of this process, which for CUDA becomes the current one: the programs name no index."""
    if manifest.device_type != "cuda":
        return torch.device(manifest.device_type)
    if not torch.cuda.is_available():
        raise LaunchError(
            "the artifact is for CUDA, and torch finds no CUDA device here",
            help="run it on a machine with GPUs, or convert the model again with --device cpu",
        )
    count = torch.cuda.device_count()
    joined = dist.is_initialized()
    rank = dist.get_rank() if joined else _number("RANK")
    local = _number("LOCAL_RANK", rank % count)
    processes = max(_number("LOCAL_WORLD_SIZE", 1), local + 1)
    if processes > count and not joined:  # who joined a group has seen to it: gloo's processes may share a device
        raise LaunchError(
            f"{processes} processes on this machine, and torch finds {count} CUDA device{'s' * (count != 1)}: NCCL "
            "needs one each",
            help=f"start {count} on a machine, each of which sees all its GPUs (CUDA_VISIBLE_DEVICES)",
        )
    device = torch.device("cuda", local % count)
    torch.cuda.set_device(device)
    return device


def _join_world(manifest: Manifest, timeout: timedelta) -> None:
    if not dist.is_initialized():
        start = f"start it with torchrun --nproc-per-node {manifest.world_size}"
        if missing := [name for name in ("RANK", "WORLD_SIZE") if name not in os.environ]:
            raise LaunchError(
                f"this process is part of no group: {' and '.join(missing)} {'are' if missing[1:] else 'is'} not set",
                help=start,
            )
        size = _number("WORLD_SIZE")
        _same_world(size, manifest)
        if (rank := _number("RANK")) >= size:
            raise LaunchError(f"RANK is {rank} in a world of {size}", help=f"use a rank from 0 to {size - 1}")
        if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
            raise LaunchError(f"the ranks have no place to meet: {missing[0]} is not set", help=start)
        if (port := _number("MASTER_PORT")) >= 1 << 16:
            raise LaunchError(f"MASTER_PORT is {port}, and the last port is {(1 << 16) - 1}", help=start)
        backend = "nccl" if manifest.device_type == "cuda" else "gloo"
        try:
            dist.init_process_group(backend, timeout=timeout)
        except dist.DistError as error:
            raise LaunchError(
                f"not all of {manifest.world_size} ranks came within {timeout.total_seconds():g} s: {_line(error)}",
                help=RESTART,
            ) from error
        assert dist.group.WORLD is not None
        if backend == "gloo":
            destroy_at_exit(dist.group.WORLD)
    _same_world(dist.get_world_size(), manifest)


def _number(name: str, otherwise: int = 0) -> int:
    """What the environment says of this process."""
    text = os.environ.get(name, str(otherwise))
    if not (text.isascii() and text.isdecimal()):
        raise LaunchError(f"{name} is {text!r}, which is no number", help="start it with torchrun, which sets it")
    return int(text)


def _line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _same_world(size: int, manifest: Manifest) -> None:
    if size != manifest.world_size:
        raise LaunchError(
            f"the artifact is for {manifest.world_size} ranks, this world has {size}",
            help=f"start it with torchrun --nproc-per-node {manifest.world_size}, or convert for {size}",
        )


def _register_groups(manifest: Manifest, timeout: timedelta) -> None:
    """Every name stands for a group of this rank; an equal registration by another artifact is used again.

    With gloo every group is made here, also one of all ranks, so that it can be destroyed at exit (see `leave`): the
    default group may be the caller's. With NCCL another group of all ranks would only take GPU memory.
    """
    nccl = dist.get_backend() == "nccl"
    for name, groups in manifest.groups.items():
        own = next(ranks for ranks in groups if dist.get_rank() in ranks)
        if not group_is_registered(name):
            # Every rank makes every group, in the same order, as new_group asks for.
            made = [
                dist.group.WORLD if nccl and len(ranks) == dist.get_world_size() else dist.new_group(ranks, timeout)
                for ranks in groups
            ]
            group = made[groups.index(own)]
            assert group is not None
            register_group(name, group)
            if not nccl:
                destroy_at_exit(group)
        elif (taken := dist.get_process_group_ranks(resolve_group(name))) != list(own):
            raise LaunchError(
                f"the process-group name {name!r} is that of the ranks {taken}, this artifact's of {own}",
                help="load this artifact in another process",
            )
