"""`tpcompiler.load`, which can also read the weights from a checkpoint."""

from __future__ import annotations

import functools
import os
from collections.abc import ItemsView, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, get_args

import torch
from torch.export import ExportedProgram

from tpcompiler._torch import Recompute
from tpcompiler.errors import InputsError, UnsupportedError
from tpcompiler.runtime.agree import WAIT, agreeing
from tpcompiler.runtime.artifact import SINGLE
from tpcompiler.runtime.load_programs import Host, Loading, load_programs


class RankModule(torch.nn.Module):
    """A rank's program: call it like the model. Of several programs, a dict of them by name.

    For type checkers and editors: no instance is made of it.

    Attributes:
        exported_program: the rank's program.
        leaf_names: of each rank of a process that runs several, the names of the rank's tensors here.
        group_names: the process groups whose ranks call it together.
        saved_bytes: with `training`, what the forward leaves to the backward.
    """

    exported_program: ExportedProgram
    leaf_names: list[dict[str, str]]
    group_names: list[str]
    saved_bytes: int

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's outputs."""
        raise NotImplementedError

    def no_sync(self) -> AbstractContextManager[None]:
        """Leave out the last sums of gradients over ranks in backwards of the block; with `training`."""
        raise NotImplementedError

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> torch.Tensor:
        """Scale the gradients so that the norm of all ranks' together is at most `max_norm`; with `training`."""
        raise NotImplementedError

    def distributed_state(self, optimizer: torch.optim.Optimizer | None = None) -> dict[str, dict[str, Any]]:
        """Return the state that torch.distributed.checkpoint saves and loads; with `training`."""
        raise NotImplementedError

    def __getitem__(self, name: str) -> RankModule:
        """Return the program of this name, of several."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of several programs."""
        raise NotImplementedError

    def items(self) -> ItemsView[str, RankModule]:
        """Return several programs with their names."""
        raise NotImplementedError


def load(
    directory: str | os.PathLike[str],
    rank: int | None = None,
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    check_inputs: bool = False,
    timeout: timedelta = WAIT,
    trust: bool = False,
    compiled: bool | None = None,
    backend: str | None = None,
    training: bool = False,
    recompute: Recompute = "min-cut",
    microbatches: int = 1,
    same_bits: bool = False,
) -> RankModule:
    """Return this process's program, ready to call.

    Selects the GPU of this process (`LOCAL_RANK`) for a CUDA program, initialises the default process group
    from torchrun's environment unless the caller has (NCCL for CUDA, gloo for CPU), makes the groups that the graphs
    name, compares the files' hashes with the manifest, and puts the weights on the device.

    All ranks must have the same artifact, world and versions: they compare them before any collective, and all raise
    if one of them fails or does not arrive.

    A script may simply end: gloo groups that are made here are destroyed at exit, unless the caller has called
    `destroy_process_group`. The caller's own process group is left alone. With NCCL, end with
    `destroy_process_group`, as torch requires.

    Args:
        directory: an artifact of `ParallelProgram.save` or `tpcompiler convert`.
        rank: this process's rank, by default that of the process group.
        checkpoint: a directory of safetensors files, for an artifact that was converted without weights: this rank
            reads only its own shares, and writes nothing.
        check_inputs: in the first call, all ranks that run a program together compare the dtypes and shapes of their
            inputs, and the content of those that every rank gets whole, before the first collective. Later calls are
            not compared: if they differ, results are undefined, and ranks may hang until the process group's own
            timeout.
        timeout: how long ranks wait for each other: here, and in collectives of the groups that are made here.
        trust: also read files that need a pickle or could run code (docs/security.md).
        compiled: run the package that `tpcompiler package` wrote (True), or the uncompiled programs (False). The
            default is the package if `trust` is set, because it is machine code; otherwise a warning names it.
        backend: the backend of the process group that is initialised here, "nccl" or "gloo".
        training: for a program of `export_training`: the module returns the model's outputs, and `loss.backward()`
            adds the gradients to the parameters. `module.clip_grad_norm_(max_norm)` clips their norm over all ranks;
            backwards in `with module.no_sync():` leave out the sums over ranks, which the next backward outside makes,
            or the next clipping or step; `module.distributed_state(optimizer)` is what torch.distributed.checkpoint
            saves, and loads on any number of ranks. All ranks must call all of these in the same order.
        recompute: what the backward computes again instead of finding it saved: what is cheap ("min-cut", by torch's
            partitioner), everything except collectives and ops that may draw random numbers, such as attention ("all"),
            or nothing ("none").
            `module.saved_bytes` is what the forward leaves to the backward.
        microbatches: of a program that was cut into stages: the number of batches, along dim 0, of a call; a stage
            works on one while later stages work on those before it. Each has its own buffers (caches). Inputs that do
            not grow with the batch, such as positions, are given once.
        same_bits: give the same bits on any number of processes that divides the artifact's ranks: each process runs
            as many ranks in a row, with the kernels and shapes of these, and sums follow one tree (docs/same-bits.md).
            A process takes and returns the shares of its ranks in one. With `training`, gradients and the clipped norm
            have the same bits, too; `no_sync` and `distributed_state` are refused.

    Returns:
        The module: call it like the model; it records no gradients without `training`. Its `exported_program` is the
        rank's `ExportedProgram`. For a directory with several programs, a dict of modules by name that share weights
        and buffers: all see what one of them writes into a cache.

    Raises:
        ArtifactError: the artifact is missing or damaged, or returns no gradients to train with, the checkpoint does
            not fit it or, without `trust`, files could run code. The requested package is missing, or this process
            cannot run it: it is for another torch, CPU, GPU or number of threads.
        LaunchError: not started by torchrun, another world size or rank, a group name in use, no GPU for this
            process, another rank that fails, is missing, or has another artifact, or ranks of a group that cannot
            reach each other.
        InputsError: an unknown `recompute`.
        UnsupportedError: the backend lacks a collective for its dtype; training in `torch.inference_mode()`, or of a
            package; or `same_bits` of stages.
        MeshError: `same_bits` on a number of processes that cannot run as many whole ranks each.
    """
    if recompute not in get_args(Recompute):
        raise InputsError(f"recompute is {recompute!r}", help=f"give one of {', '.join(get_args(Recompute))}")
    if training and compiled:
        raise UnsupportedError("a package has no backward of its own to train with", help="load it with compiled=False")
    if training and torch.is_inference_mode_enabled():
        raise UnsupportedError(
            "torch.inference_mode() is on, in which parameters cannot be trained later", help="load outside of it"
        )
    host: Host | None = None
    if same_bits:
        from tpcompiler.checkpoint.hosted import names_in, read_hosted  # most deployments do not need them

        host = Host(read_hosted, names_in)
    weights = None
    if checkpoint is not None:
        from tpcompiler.checkpoint.cut import read_shares  # a deployment with weights does not need it

        weights = functools.partial(read_shares, checkpoint)
    loaded: Any = load_programs(
        directory,
        rank,
        Loading(check_inputs, timeout, weights, microbatches, host),
        trust=trust,
        compiled=False if training else compiled,
        backend=backend,
    )
    if training:
        from tpcompiler.checkpoint.training import make_trainable
        from tpcompiler.runtime.program_files import open_programs

        manifests = {name: files.manifest for name, files in open_programs(directory, trust=trust).items()}
        with agreeing(timeout) as mine:
            modules = loaded if isinstance(loaded, dict) else {SINGLE: loaded}
            mine["the list of collectives of forward and backward"] = make_trainable(
                modules, manifests, recompute, same_bits
            )
    return loaded  # type: ignore[no-any-return]
