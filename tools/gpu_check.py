"""Check on a machine with GPUs what the tests, which need none, cannot: run by hand, it prints a table.

    python -m tools.gpu_check [--out docs/gpu.md] [--device cpu] [--no-aoti]

A Llama is exported on the CPU in float32 and bfloat16 and converted for the device. Then, each against the whole model
moved to the device:

- all ranks of worlds of 2 and 4 run in lock step, in this process, on one device;
- the saved files run in one process per rank, with NCCL and over symmetric memory (on the CPU with gloo);
- the same files are compiled by AOTInductor (`tpcompiler package`), and all ranks run the package, in such processes;
  where cmake and the headers are that docs/deploy.md names, so does the service of examples/cpp.

With fewer GPUs than ranks, the processes share one. NCCL refuses that on one machine, so each process then gives itself
out as a machine of its own: NCCL's kernels run, and what they send goes over sockets.

`python -m tools.gpu_zoo` compares many models in lock step, `python -m tools.gpu_steps` measures a rank's step beside
the whole one's.

What could not be run is listed with its reason. Exits with 1 if anything that was run broke or is not right.
`--device cpu` takes the same way on a machine without a GPU.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.export import ExportedProgram

import tpcompiler
from tools.bench_convert import PLAN
from tpcompiler.api.parallel_program import ParallelProgram
from tpcompiler.judge.compare.judge import FLOOR, SPREAD
from tpcompiler.judge.compare.processes import run_ranks, share_gpus
from tpcompiler.judge.compare.trial import run_single
from tpcompiler.parallel.program_subject import compared_calls, subject_of
from tpcompiler.passes.canonicalize import canonicalize
from tpcompiler.passes.move_device import move_device
from tpcompiler.runtime.artifact import SINGLE, read_manifest
from tpcompiler.runtime.inputs import flatten_inputs, write_tensors
from tpcompiler.runtime.place import place_state
from tpcompiler.runtime.run import run_file

DTYPES = ("float32", "bfloat16")
IDS = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))
SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 256}
HEADS: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4}
HEAD = """\
# tpcompiler on a GPU

{name}; {day}; torch {torch}; `python -m tools.gpu_check --device {device}`

Errors are the largest over all ranks, relative to the largest magnitude of the output.

| check | model | ranks | error | tolerance | |
|---|---|---|---|---|---|
"""


class Table:
    """Rows of what was run, what broke while it ran, and reasons for what was not run."""

    def __init__(self) -> None:
        self.rows, self.broken, self.not_run = list[str](), list[str](), list[str]()

    def leave_out(self, check: str, why: str) -> None:
        self.not_run.append(f"- {check}: {why}\n")
        print(f"{check}: not run: {why}", file=sys.stderr, flush=True)

    def fail(self, check: str, why: str) -> None:
        self.broken.append(f"- {check}: {why}\n")
        print(f"{check}: BROKEN: {why}", file=sys.stderr, flush=True)

    def add(self, check: str, model: str, ranks: int, error: float, tolerance: float) -> None:
        word = "right" if error <= tolerance else "WRONG"  # of a NaN too
        self.rows.append(f"| {check} | {model} | {ranks} | {error:.2g} | {tolerance:.2g} | {word} |\n")
        print(f"{check}, {model}, {ranks} ranks: {word}", file=sys.stderr, flush=True)

    @property
    def right(self) -> bool:
        return bool(self.rows) and not self.broken and all(row.endswith("right |\n") for row in self.rows)

    def text(self, device: str) -> str:
        head = HEAD.format(name=name_of(device), day=datetime.date.today(), torch=torch.__version__, device=device)
        both = (("BROKEN", self.broken), ("Not run", self.not_run))
        notes = (f"\n{title}:\n\n{''.join(found)}" for title, found in both if found)
        return head + "".join((*self.rows, *notes))


def name_of(device: str) -> str:
    """The device, as a report has it."""
    if device == "cpu":
        return f"no GPU ({platform.machine()} CPU)"
    version = ".".join(map(str, torch.cuda.nccl.version()))
    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}; CUDA {torch.version.cuda}; NCCL {version}"


def exported(dtype: torch.dtype) -> ExportedProgram:
    from transformers import LlamaConfig, LlamaForCausalLM  # takes seconds, which the workers need not spend

    from tests.zoo.case import randomise

    model = randomise(LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, use_cache=False)))
    return torch.export.export(model.to(dtype).eval(), (), {"input_ids": IDS}, strict=False)


def on_device(program: ExportedProgram, device: str) -> ExportedProgram:
    """The single-device program where the ranks run."""
    moved = move_device(canonicalize(program).source, device)
    place_state(moved, device)
    return moved


def simulated(table: Table, model: str, whole: ExportedProgram, made: ParallelProgram) -> None:
    there = {"input_ids": IDS.to(made.device_type)}
    report = compared_calls(
        {SINGLE: replace(subject_of(made.only), reference=whole, intermediate=None)}, [(SINGLE, (), there)]
    )
    for row in report.outputs:
        table.add(f"lock step, {row.name}", model, made.world_size, row.rel, row.tolerance)


def launched(table: Table, model: str, whole: ExportedProgram, made: ParallelProgram, backend: str) -> None:
    """The saved files in real processes, on rank 0's word: every output is whole there."""
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        made.save(folder / "out")
        write_tensors(folder / "in", {"input_ids": IDS})
        _torchrun(made.world_size, "-m", "tools.gpu_check", "--worker", directory)
        (got,) = load_file(folder / "answer").values()
        judge(table, f"saved files, {backend}", model, whole, made, got)


def compiled(table: Table, model: str, whole: ExportedProgram, made: ParallelProgram) -> None:
    """The package, as `package` itself compares it with the model, and as the service in C++ runs it."""
    with tempfile.TemporaryDirectory() as folder:
        made.save(Path(folder) / "out", layout="shared")
        report = tpcompiler.open(Path(folder) / "out").package()[1]
        assert report is not None
        for row in report.outputs:
            table.add(f"package, {row.name}", model, made.world_size, row.rel, row.tolerance)
        if made.manifest().asked.collectives != "nccl":
            return  # the service has NCCL's alone
        if shutil.which("cmake"):
            serve(table, model, whole, made, Path(folder))
        else:
            table.leave_out(f"service in C++, {model}", "there is no cmake here")


def judge(
    table: Table, check: str, model: str, whole: ExportedProgram, made: ParallelProgram, got: torch.Tensor
) -> None:
    """An answer beside the whole model's on the same device."""
    flat = flatten_inputs(whole, (), {"input_ids": IDS.to(made.device_type)})
    want, exact = (run_single(whole, flat, dtype).outputs[0] for dtype in (None, torch.float64))
    scale, eps = float(exact.abs().amax()), torch.finfo(want.dtype).eps
    want, exact = want.double().cpu(), exact.double().cpu()
    noise = float((want - exact).abs().amax()) / scale
    error = float((got.double() - want).abs().amax()) / scale
    table.add(check, model, made.world_size, error, max(SPREAD * noise, FLOOR * eps))


def serve(table: Table, model: str, whole: ExportedProgram, made: ParallelProgram, folder: Path) -> None:
    """The package `out` in the folder, by the service in C++."""
    source = Path(__file__).parents[1] / "examples" / "cpp"
    where = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    for words in (["-S", source, "-B", folder / "build", where], ["--build", folder / "build", "-j2"]):
        done = subprocess.run(["cmake", *map(str, words)], capture_output=True, text=True, timeout=300)
        if done.returncode:
            errors = re.findall(".*(?:CMake Error|: error:).*", done.stdout + done.stderr)
            table.leave_out(f"service in C++, {model}", f"it was not built: {(errors or ['no reason'])[0]}")
            return
    request, shares = folder / "request.json", torch.cuda.device_count() < made.world_size
    request.write_text(json.dumps({"inputs": {"input_ids": IDS.tolist()}}) + "\n")
    alone = "LOCAL_RANK=0 NCCL_HOSTID=$RANK NCCL_SOCKET_IFNAME=lo " * (made.device_type == "cuda" and shares)
    call = f'{alone}exec "$0" "$1" < "$2" > "$2.$RANK"'
    files = (str(each) for each in (folder / "build" / "serve", folder / "out", request))
    _torchrun(made.world_size, "--no-python", "sh", "-c", call, *files)
    answers = [line for line in Path(f"{request}.0").read_text().splitlines() if line.startswith("{")]
    (got,) = json.loads(answers[-1]).values()
    judge(table, "service in C++", model, whole, made, torch.tensor(got))


def work(folder: Path) -> None:
    """One process of `launched`."""
    share_gpus()
    module = tpcompiler.load(folder / "out")
    named = run_file(module, read_manifest(folder / "out"), folder / "in")
    if dist.get_rank() == 0:
        write_tensors(folder / "answer", named)
    dist.destroy_process_group()


def _torchrun(ranks: int, *words: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *words]
    run_ranks(command, 1, datetime.timedelta(minutes=2), help=f"run it by itself: {' '.join(command)}")


def attempt(table: Table, what: str, check: Callable[..., None], *args: object) -> None:
    """A check that breaks is reported; the others go on."""
    try:
        check(*args)
    except Exception as error:  # whatever the device, its driver or its compiler raises
        table.fail(what, f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0]}")


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options.add_argument("--out", type=Path, help="also write the table here")
    options.add_argument("--dtype", choices=DTYPES, action="append", help="one of them; without it both")
    options.add_argument("--ranks", type=int, action="append", help="one number of them; without it 2, 4 and 8")
    options.add_argument("--no-symm-mem", action="store_true", help="leave symmetric memory out")
    options.add_argument("--no-aoti", action="store_true", help="leave AOTInductor out, which takes a minute")
    options.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    asked = options.parse_args()
    if asked.worker:
        work(asked.worker)
        return 0
    if asked.device == "cuda" and not torch.cuda.is_available():
        print("torch finds no CUDA device here: nothing was checked (try --device cpu)", file=sys.stderr)
        return 2
    table = Table()
    gpu = asked.device == "cuda"
    backend = "nccl" if gpu else "gloo"
    for name in asked.dtype or DTYPES:
        model = f"Llama, {name}"
        program = exported(getattr(torch, name))
        whole = on_device(program, asked.device)
        for ranks in asked.ranks or (2, 4, 8):
            made = tpcompiler.parallelize(program, ranks, PLAN, device_type=asked.device)
            at = f"{model}, {ranks} ranks"
            attempt(table, f"lock step, {at}", simulated, table, model, whole, made)
            if ranks > max(2, torch.cuda.device_count()):
                why = f"this machine has {torch.cuda.device_count()} GPUs, and more than two processes share none"
                table.leave_out(f"saved files, {at}", why)
                continue
            attempt(table, f"saved files, {at}", launched, table, model, whole, made, backend)
            if ranks == 2 and not asked.no_aoti:
                attempt(table, f"AOTInductor, {at}", compiled, table, model, whole, made)
            if gpu and not asked.no_symm_mem:
                over = f"{model}, symm_mem"
                one = tpcompiler.parallelize(program, ranks, PLAN, device_type="cuda", collectives="symm_mem")
                attempt(table, f"saved files, {over}", launched, table, over, whole, one, backend)
                if ranks == 2 and not asked.no_aoti:
                    attempt(table, f"AOTInductor, {over}", compiled, table, over, whole, one)
    if not gpu:
        table.leave_out("NCCL, symm_mem", "they take a GPU")
    if asked.no_aoti:
        table.leave_out("AOTInductor", "--no-aoti was given")
    text = table.text(asked.device)
    print(text, end="")
    if asked.out:
        asked.out.write_text(text, encoding="utf-8")
    return 0 if table.right else 1


if __name__ == "__main__":
    sys.exit(main())
