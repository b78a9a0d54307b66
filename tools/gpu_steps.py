"""How long a rank's step takes on one device, beside an N-th of the whole: `python -m tools.gpu_steps [--device cpu]`.

Models of the shape of Llama's, exported without weights and given random ones: 1B (16 layers), and four layers of 8B,
in bfloat16; a prompt of (1, 512) tokens and a step of (8, 1), for 2, 4 and 8 ranks. Rank 0's program runs alone: its
collectives answer at once, with what the rank itself holds, so what is measured is its own work and no communication.
Eagerly, compiled by AOTInductor, and on CUDA as a graph that is captured once and replayed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

import tpcompiler
from passes.move_device import move_device
from tpcompiler._inductor import compile_module, write_package
from tpcompiler._torch import fake_group
from tpcompiler.exporting import export_prefill_and_decode
from tpcompiler.packaging import plain_module
from tpcompiler.plan import Plan

Run = Callable[[], Any]
SHAPES: dict[str, dict[str, int]] = {
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32},
    "8B, 4 layers": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
    },
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 8},
}
PHASES = {"prefill": (1, 512), "decode": (8, 1)}


def programs_of(shape: str, batch: int, length: int, dtype: str) -> tuple[dict[str, ExportedProgram], Plan]:
    """Prefill and decode without weights, and transformers' own plan."""
    with tempfile.TemporaryDirectory() as folder:
        from transformers import LlamaConfig

        vocabulary = 128_256 if shape != "tiny" else 512
        config = LlamaConfig(
            **SHAPES[shape],
            num_key_value_heads=8,
            vocab_size=vocabulary,
            architectures=["LlamaForCausalLM"],
            dtype=dtype,
        )
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config.to_dict(), default=str))
        made = export_prefill_and_decode(
            folder, batch=batch, length=min(length, 16), max_length=length + 32, dtype=dtype
        )
        return made, Plan.of(path)


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


@contextmanager
def ways(program: ExportedProgram, args: tuple[torch.Tensor, ...], device: str) -> Iterator[dict[str, Run]]:
    """The ways to run a program whose collectives answer at once."""
    eager = program.module(check_guards=False)
    kwargs = dict(zip(("input_ids", "cache_position"), args, strict=True))
    found: dict[str, Run] = {"eager": lambda: eager(**kwargs)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "compiled.pt2"
        module, example = plain_module(program, path)
        write_package(path, {"model": compile_module(module, example, torch.get_num_threads())})
        runner: Any = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, -1 if device == "cpu" else 0)
        held = {**program.constants, **program.state_dict}
        constants = {name: held[name].detach() for name in runner.get_constant_fqns()}
        runner.load_constants(constants, False, True, True)
        found["AOTInductor"] = lambda: runner.run(list(args))
        if device == "cuda":
            graph = torch.cuda.CUDAGraph()
            runner.run(list(args))
            with torch.cuda.graph(graph):
                runner.run(list(args))
            found["CUDA graph"] = graph.replay
        yield found


def measure(shape: str, phase: str, device: str, worlds: list[int], dtype: str) -> Iterator[str]:
    """A line for each way to run and each number of ranks."""
    batch, count = PHASES[phase]
    programs, plan = programs_of(shape, batch, count if phase == "prefill" else 512, dtype)
    args = (
        torch.randint(500, (batch, count), device=device),
        torch.arange(count, device=device) + (100 if phase == "decode" else 0),
    )
    whole = move_device(programs[phase], device)
    fill(whole, device)
    with ways(whole, args, device) as found:
        full = {name: seconds(run, device) for name, run in found.items()}
    del whole
    for world in worlds:
        made = tpcompiler.parallelize({phase: programs[phase]}, world, plan, device_type=device)[phase]
        program = made.rank_program(0)
        fill(program, device)
        group = made.mesh.group_name(made.mesh.names)
        with fake_group(group, 0, world, device), ways(program, args, device) as found:
            for name, run in found.items():
                spent = seconds(run, device)
                yield (
                    f"| {shape} | {phase} {PHASES[phase]} | {world} | {name} | {full[name] * 1e3:.2f} | "
                    f"{spent * 1e3:.2f} | {spent / (full[name] / world):.2f} |"
                )


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options.add_argument("--shape", choices=SHAPES, action="append")
    options.add_argument("--ranks", type=int, action="append")
    options.add_argument("--phase", choices=PHASES, action="append")
    options.add_argument("--dtype", default="bfloat16")
    asked = options.parse_args()
    if asked.device == "cuda" and not torch.cuda.is_available():
        print("torch finds no CUDA device here: nothing was measured (try --device cpu --shape tiny)", file=sys.stderr)
        return 2
    warnings.simplefilter("ignore")
    print("| model | step | ranks | run | whole, ms | a rank, ms | a rank / (whole / ranks) |\n" + "|---" * 7 + "|")
    with torch.no_grad():
        for shape in asked.shape or ["1B", "8B, 4 layers"]:
            for phase in asked.phase or PHASES:
                for line in measure(shape, phase, asked.device, asked.ranks or [2, 4, 8], asked.dtype):
                    print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
