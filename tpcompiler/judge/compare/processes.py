"""Run an artifact's ranks in separate processes, as a deployment does, and collect their results and writes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from tpcompiler._torch import WRITTEN_KINDS, tree_flatten, tree_unflatten
from tpcompiler.checkpoint.load import load
from tpcompiler.errors import LaunchError, one_line
from tpcompiler.judge.compare.simulate import RankResult
from tpcompiler.terminal.progress import measured

LONGEST = timedelta(minutes=30)


def answers_of_ranks(
    directory: str | os.PathLike[str],
    calls: Sequence[tuple[str, Sequence[Sequence[Any]]]],
    checkpoint: str | os.PathLike[str] | None = None,
    trust: bool = False,
    threads: int = 1,
    same_bits: bool = False,
) -> list[list[RankResult]]:
    """Run each call on all ranks with the artifact's package, and return the results.

    Args:
        calls: (program, the flat inputs of every rank, or of every process).
        threads: threads of each process.
        same_bits: each process runs several ranks.

    Raises:
        LaunchError: a rank fails, or does not end in time.
    """
    world = len(calls[0][1])
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(world):
            torch.save([(name, list(shares[rank])) for name, shares in calls], Path(folder) / f"{rank}.calls")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
        command += [
            "-m",
            "tpcompiler.judge.compare.processes",
            os.fspath(directory),
            folder,
            "trust" if trust else "",
            "same_bits" if same_bits else "",
        ]
        command += [os.fspath(checkpoint)] if checkpoint is not None else []
        help = "run it by itself for all of it: torchrun ... tpcompiler run --compiled"
        with measured("running the ranks in processes", "ranks", world):
            run_ranks(command, threads, LONGEST, help=help)
        answers = [torch.load(Path(folder) / f"{rank}.answers", weights_only=True) for rank in range(world)]
    return [[RankResult(*of_rank[at]) for of_rank in answers] for at in range(len(calls))]


def share_gpus() -> None:
    """Let processes share GPUs if there are fewer than ranks: each pretends to be a machine.

    NCCL rejects two ranks of one machine on one GPU. Ranks of two machines communicate over sockets, here locally.
    """
    if torch.cuda.is_available() and torch.cuda.device_count() < int(os.environ["WORLD_SIZE"]):
        os.environ |= {"NCCL_HOSTID": os.environ["RANK"], "NCCL_SOCKET_IFNAME": "lo"}
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"


def run_ranks(command: Sequence[str], threads: int, timeout: timedelta, *, help: str) -> None:
    """Run torchrun, and end all processes if they take too long.

    Args:
        help: the advice if a rank fails.

    Raises:
        LaunchError: a rank fails, or does not end in time.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=timeout.total_seconds())
    except BaseException as error:  # any error, such as Ctrl-C: leave no rank behind
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        raise LaunchError(
            f"the ranks did not end within {timeout.total_seconds():g} s", help="give them longer, or fewer inputs"
        ) from error
    if process.returncode:
        lines = [line.partition("]: ")[2] or line for line in output.splitlines()]
        errors = [line for line in lines if "Error: " in line and "ChildFailed" not in line]
        raise LaunchError(f"a rank has failed: {one_line((errors or lines or ['no output'])[0].strip())}", help=help)


def main(directory: str, folder: str, trust: str, same_bits: str, checkpoint: str | None = None) -> None:
    """Make one rank's calls of the package for `answers_of_ranks`, and write the results and writes to a file."""
    share_gpus()
    loaded = load(directory, compiled=True, trust=bool(trust), checkpoint=checkpoint, same_bits=bool(same_bits))
    rank = dist.get_rank()
    answers = []
    for name, flat in torch.load(Path(folder) / f"{rank}.calls", weights_only=True):
        module = loaded[name] if isinstance(loaded, dict) else loaded
        answers.append(_call(module, module.exported_program, flat))
    torch.save(answers, Path(folder) / f"{rank}.answers")
    dist.destroy_process_group()


def _call(module: Any, program: ExportedProgram, flat: list[Any]) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Return the flat outputs, and the values written, by the name of the buffer or input."""
    specs = program.graph_signature.input_specs
    taken = [spec.arg.name for spec in specs if spec.kind is InputKind.USER_INPUT]
    held: Mapping[str, Any] = {**program.constants, **program.state_dict, **dict(zip(taken, flat, strict=True))}
    written = [str(spec.target) for spec in program.graph_signature.output_specs if spec.kind in WRITTEN_KINDS]
    before = {name: held[name].clone() for name in program.graph_signature.buffers if name not in written}
    args, kwargs = tree_unflatten(flat, program.call_spec.in_spec) if program.call_spec.in_spec else (flat, {})
    outputs = tree_flatten(module(*args, **kwargs))[0]
    # Batch norm writes its statistics without a signature that says so.
    written += [name for name, value in before.items() if not torch.equal(value, held[name])]
    return [_own(value) for value in outputs], {name: _own(held[name]) for name in written}


def _own(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


if __name__ == "__main__":
    main(*sys.argv[1:])
