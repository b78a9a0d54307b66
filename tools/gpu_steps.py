"""How long a rank's step takes on one device, beside an N-th of the whole: `python -m tools.gpu_steps [--device cpu]`.

Models of the shape of Llama's, exported without weights and given random ones: 1B (16 layers), and four layers of 8B,
in bfloat16; a prompt of (1, 512) tokens and a step of (8, 1), for 2, 4 and 8 ranks. Rank 0's program runs alone: its
collectives answer at once, with what the rank itself holds, so what is measured is its own work and no communication.
Eagerly, compiled by AOTInductor, and on CUDA as a graph that is captured once and replayed. All are compiled side by
side, in a process each, and measured one after the other. The last columns are what the kernels of the same program are
predicted to take on a machine, an H100 by default, and the measured time over it.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import multiprocessing
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.export import ExportedProgram

import tpcompiler
from tools.published.model import Dims, export_from_config
from tpcompiler._torch import aten, fake_group
from tpcompiler._torch.inductor import compile_module, write_package
from tpcompiler.api.packaging import plain_module
from tpcompiler.cost.machine_file import read_machine
from tpcompiler.passes.move_device import move_device
from tpcompiler.plan.plan import Plan

Run = Callable[[], Any]
SHAPES = {
    "1B": Dims(16, 2048, 8192, 32, 8, 128_256),
    "8B, 4 layers": Dims(4, 4096, 14336, 32, 8, 128_256),
    "tiny": Dims(1, 64, 128, 8, 8, 512),
}
PHASES = {"prefill": (1, 512), "decode": (8, 1)}
WHOLE = Plan.of({"**": "replicate"})
READY = "ready"


class Job(NamedTuple):
    """A program to measure; the whole model is one rank of one."""

    shape: str
    phase: str
    ranks: int
    device: str
    dtype: str
    machine: str


def fill(program: ExportedProgram, device: str) -> None:
    """Give a program random weights, and empty caches, on a device."""
    for held in (program.state_dict, program.constants):
        for name, value in held.items():
            if isinstance(value, torch.Tensor):
                made = torch.zeros(value.shape, dtype=value.dtype, device=device)
                if value.is_floating_point() and "cache" not in name:
                    made.normal_(1.0 if "norm" in name else 0.0, 0.02)
                held[name] = torch.nn.Parameter(made, False) if isinstance(value, torch.nn.Parameter) else made


def seconds(run: Run, device: str, repeat: int = 20) -> float:
    """The median of so many runs, after three to warm up."""
    spent = []
    for at in range(repeat + 3):
        _wait(device)
        began = time.perf_counter()
        run()
        _wait(device)
        spent += [time.perf_counter() - began] * (at >= 3)
    return statistics.median(spent)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def prepare(
    job: Job, folder: Path, group: contextlib.ExitStack
) -> tuple[ExportedProgram, tuple[torch.Tensor, ...], float]:
    """The program of rank 0 with random weights, what it is called with, and the predicted seconds of its kernels.

    The package is in the folder. The group that answers at once is there until the stack closes.
    """
    batch, count = PHASES[job.phase]
    is_decode = job.phase == "decode"
    whole, plan = export_from_config(SHAPES[job.shape], batch, 512, is_decode=is_decode, room=544, dtype=job.dtype)
    made = tpcompiler.parallelize(whole, max(job.ranks, 2), plan if job.ranks > 1 else WHOLE, device_type=job.device)
    predicted = made.converted.predict(read_machine(job.machine)).total
    if job.ranks > 1:
        program, mesh = made.rank_program(0), made.mesh
        group.enter_context(fake_group(mesh.group_name(mesh.names), 0, job.ranks, job.device))
    else:
        program = move_device(whole, job.device)
        for node in program.graph.find_nodes(op="call_function", target=aten._assert_tensor_metadata.default):
            program.graph.erase_node(node)  # to Inductor `cuda` and `cuda:0` differ there
    fill(program, job.device)
    module, example = plain_module(program, folder)
    write_package(folder / "compiled.pt2", {"model": compile_module(module, example, torch.get_num_threads())})
    start = 100 if is_decode else 0
    args = torch.randint(500, (batch, count), device=job.device), torch.arange(count, device=job.device) + start
    return program, args, predicted.work + predicted.kernels


def ways(
    program: ExportedProgram, args: tuple[torch.Tensor, ...], device: str, package: Path
) -> Iterator[tuple[str, Run]]:
    """The ways to run a program whose collectives answer at once."""
    eager = program.module(check_guards=False)
    kwargs = dict(zip(("input_ids", "cache_position"), args, strict=True))
    yield "eager", lambda: eager(**kwargs)
    # single-threaded: otherwise a call first asks whether the last one has ended, which no capture allows
    runner: Any = torch._C._aoti.AOTIModelPackageLoader(str(package), "model", True, 1, -1 if device == "cpu" else 0)
    held = {**program.constants, **program.state_dict}
    constants = {name: held[name].detach() for name in runner.get_constant_fqns()}
    runner.load_constants(constants, False, True, True)
    yield "AOTInductor", lambda: runner.run(list(args))
    if device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            runner.run(list(args))
        yield "CUDA graph", graph.replay


def work(job: Job, link: Connection) -> None:
    """Prepare, say so, wait until the others are prepared, measure, and send what was found."""
    warnings.simplefilter("ignore")
    found, predicted, failed = dict[str, float](), math.nan, ""
    try:
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as group, torch.no_grad():
            program, args, predicted = prepare(job, Path(folder), group)
            link.send(READY)
            link.recv()
            for name, run in ways(program, args, job.device, Path(folder) / "compiled.pt2"):
                found[name] = seconds(run, job.device)
    except Exception:  # whatever the device or its compiler raises: the others are wanted all the same
        failed = traceback.format_exc()
    link.send((found, predicted, failed))


def measure(jobs: list[Job]) -> Iterator[tuple[Job, dict[str, float], float, bool]]:
    """Of each the seconds by way to run, those predicted, and whether all went well; what fails is printed."""
    spawn, links = multiprocessing.get_context("spawn"), list[Connection]()
    for job in jobs:
        ours, theirs = spawn.Pipe()
        spawn.Process(target=work, args=(job, theirs), daemon=True).start()
        theirs.close()  # so that the end of the process is seen here
        links.append(ours)
    for job, link, first in [(job, link, receive(link)) for job, link in zip(jobs, links, strict=True)]:
        if first == READY:
            link.send("go")
        found, predicted, failed = receive(link) if first == READY else first
        if failed:
            print(f"{job}: {failed}", file=sys.stderr, flush=True)
        yield job, found, predicted, not failed


def receive(link: Connection) -> Any:
    """What a process sends, or that it has ended."""
    try:
        return link.recv()
    except EOFError:
        return {}, math.nan, "its process ended"


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options.add_argument("--shape", choices=SHAPES, action="append")
    options.add_argument("--ranks", type=int, action="append")
    options.add_argument("--phase", choices=PHASES, action="append")
    options.add_argument("--dtype", default="bfloat16")
    options.add_argument("--machine", default="h100", help="the machine file to predict for")
    asked = options.parse_args()
    if asked.device == "cuda" and not torch.cuda.is_available():
        print("torch finds no CUDA device here: nothing was measured (try --device cpu --shape tiny)", file=sys.stderr)
        return 2
    jobs = [
        Job(shape, phase, ranks, asked.device, asked.dtype, asked.machine)
        for shape in asked.shape or ["1B", "8B, 4 layers"]
        for phase in asked.phase or PHASES
        for ranks in (1, *(asked.ranks or (2, 4, 8)))
    ]
    print("| model | step | ranks | run | whole, ms | a rank, ms | of whole / ranks | predicted, ms | of predicted |")
    print("|---" * 9 + "|")
    whole, measured = dict[tuple[str, str, str], float](), 0
    for job, spent, predicted, right in measure(jobs):
        measured += right
        for name, took in spent.items():
            if job.ranks == 1:
                whole[job.shape, job.phase, name] = took
            full = whole.get((job.shape, job.phase, name), math.nan)
            print(
                f"| {job.shape} | {job.phase} {PHASES[job.phase]} | {job.ranks} | {name} | {full * 1e3:.2f} | "
                f"{took * 1e3:.2f} | {took * job.ranks / full:.2f} | {predicted * 1e3:.3f} | {took / predicted:.2f} |",
                flush=True,
            )
    return int(measured < len(jobs))


if __name__ == "__main__":
    sys.exit(main())
