"""`tpcompiler.load`, which also takes the weights from a checkpoint."""

from __future__ import annotations

import functools
import os
from datetime import timedelta
from typing import Any

from tpcompiler.runtime.agree import WAIT
from tpcompiler.runtime.load import load as load_rank


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
) -> Any:
    """This process's program, ready to call.

    Takes the GPU of this process (`LOCAL_RANK`) for a program that is for CUDA, initialises the default process group
    from torchrun's environment where the caller has not (NCCL for CUDA, gloo for CPU), makes the groups that the graphs
    name, compares the files' hashes with the manifest, and puts the weights on the device.

    All ranks must have the same artifact, world and versions: they say so to one another before any collective, and
    where one has failed or does not come, all raise.

    A script just ends: gloo groups that are made here are destroyed at exit, unless the caller has called
    `destroy_process_group`. A process group of the caller's is left to the caller. With NCCL, end with
    `destroy_process_group`, as torch asks for.

    Args:
        directory: what `ParallelProgram.save` or `tpcompiler convert` wrote.
        rank: this process's rank; by default the process group's.
        checkpoint: a directory of safetensors files: of an artifact that was converted without weights this rank reads
            its own shares from there, and no more; nothing is written.
        check_inputs: at the first call, all ranks compare their inputs' dtypes and shapes, and the content of those
            that every rank is given whole, before the first collective. Later calls are not compared: what ranks that
            are called differently give is undefined, and they may hang until the process group's own timeout.
        timeout: how long ranks wait for one another: here, and at a collective of the groups that are made here.
        trust: read files too that need a pickle or could run code (docs/security.md).
        compiled: run the package that `tpcompiler package` wrote (True), or the programs as they are (False). The
            default is the package where `trust` is set, for it is machine code; where not, a warning names it.
        backend: of the process group that is initialised here, "nccl" or "gloo".

    Returns:
        The module: call it as the model was called; it records no gradients. Its `exported_program` is the rank's
        `ExportedProgram`. Of a directory with several programs a dict of modules by name, over one set of weights and
        buffers: what one writes into a cache the others read.

    Raises:
        ArtifactError: no artifact, a damaged one, a checkpoint that does not fit it, or, without `trust`, files that
            could run code. No package where one is asked for, or one that this process cannot run: of another torch,
            for another CPU or GPU, or for another number of threads.
        LaunchError: not started by torchrun, another world size or rank, a group name that is taken, no GPU for this
            process, another rank that has failed, is missing, or has something else, or a group of ranks that do not
            reach one another.
        UnsupportedError: a collective that the backend does not have for its dtype.
    """
    weights = None
    if checkpoint is not None:
        from tpcompiler.checkpoint.cut import read_shares  # a deployment that has its weights does without

        weights = functools.partial(read_shares, checkpoint)
    return load_rank(
        directory,
        rank,
        check_inputs=check_inputs,
        timeout=timeout,
        trust=trust,
        compiled=compiled,
        backend=backend,
        weights=weights,
    )
