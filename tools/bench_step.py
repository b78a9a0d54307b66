"""How long calls take on gloo processes of this machine, a thread each.

    python -m tools.bench_step [--rounds 15]              steps over a long cache, beside transformers sliced by hand
    python -m tools.bench_step same-bits [--rounds 25]    the same bits on fewer processes, beside plain programs

All arms run in the same processes, in turn, round after round. What is printed is the median over the rounds of each
arm's time divided by that of the first arm, in the same round.

Steps: narrow layers with the heads of Llama 3 8B, 4 queries to a head of keys, over a static cache of 2,048 tokens:
steps of (1, 1) and (8, 1) and a prompt of (1, 256). The first arm is the model that was sliced by hand; `null` is that
model once more: by how much it differs from 1 is the noise. `repeats` is converted with `--keep-repeats`, and `one
device` is the whole model on rank 0 while the other waits.

Same bits: a Llama of 4 layers, 64 tokens, on two processes and on one. The first arm is a plain program for as many
ranks as processes; printed are also the calls of ops of a process. `of 2` on 2 processes is the price of the tree.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import tpcompiler
from tools.bench_convert import PLAN

WORLD = 2


class Case(NamedTuple):
    """A call: its batch and tokens, and the tokens that the cache holds already."""

    batch: int
    tokens: int
    held: int = 0


ROOM = 2048  # tokens that the cache can hold
SHAPE: dict[str, Any] = {
    **{"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 4, "vocab_size": 10_000},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
}
CASES = {"cache": Case(1, 1, 2000), "cache-8": Case(8, 1, 2000), "prompt": Case(1, 256)}
COLUMN = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROW = ("self_attn.o_proj", "mlp.down_proj")
RANKS = (2, 4, 8)  # of the artifacts that run on fewer processes
SMALL: dict[str, Any] = {
    **{"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "vocab_size": 1024},
    **{"num_attention_heads": 8, "num_key_value_heads": 8, "use_cache": False},
}
Step = Callable[[torch.Tensor, torch.Tensor], Any]


def cached(model: Any, case: Case, ranks: int = 1) -> Step:
    """A model over a static cache of a rank's heads, as transformers exports it."""
    from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

    model.generation_config.cache_implementation, model.generation_config.use_cache = "static", True
    model.config.use_cache, before = True, model.config.num_key_value_heads
    model.config.num_key_value_heads = before // ranks
    module = TorchExportableModuleWithStaticCache(model.eval(), case.batch, ROOM, torch.device("cpu"))
    model.config.num_key_value_heads = before

    def step(ids: torch.Tensor, positions: torch.Tensor) -> Any:
        with torch.no_grad():
            return module(input_ids=ids, cache_position=positions)

    return step


def whole(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory)


def sliced(directory: Path) -> Any:
    """The model with its weights sliced by hand, and an all_reduce behind each row-wise layer."""
    from transformers import LlamaForCausalLM

    full, rank = whole(directory), dist.get_rank()
    config = copy.deepcopy(full.config)
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        setattr(config, name, getattr(config, name) // WORLD)
    made, state = LlamaForCausalLM(config), full.state_dict()
    for name, value in made.state_dict().items():
        dims = [dim for dim, size in enumerate(value.shape) if size != state[name].shape[dim]]
        value.copy_(state[name].chunk(WORLD, dims[0])[rank] if dims else state[name])

    def reduce(output: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(output)
        return output

    for layer in made.model.layers:
        for last in (layer.self_attn.o_proj, layer.mlp.down_proj):
            last.register_forward_hook(lambda module, args, output: reduce(output))
    return made


def with_dtensors(directory: Path) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

    model = whole(directory)
    styles: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in COLUMN}
    styles |= {name: RowwiseParallel() for name in ROW}
    plan = {f"model.layers.*.{name}": style for name, style in styles.items()}
    return parallelize_module(model, init_device_mesh("cpu", (WORLD,)), plan)


def time_steps(folder: Path, name: str, rounds: int) -> None:
    """A rank: time every arm of a step, and let rank 0 print the ratios."""
    case, directory = CASES[name], folder / "checkpoint"
    program = "decode" if case.tokens == 1 else "prefill"
    plain, compiled = (tpcompiler.load(folder / name, compiled=way)[program] for way in (False, True))
    repeats = tpcompiler.load(folder / f"{name}-repeats")[program]
    hand, alone = cached(sliced(directory), case), cached(whole(directory), case)
    arms: dict[str, Step] = {
        "hand": hand,
        "null": hand,
        "eager": lambda ids, at: plain(input_ids=ids, cache_position=at),
        "package": lambda ids, at: compiled(input_ids=ids, cache_position=at),
        "DTensor": cached(with_dtensors(directory), case, WORLD),
        "one device": alone,
        "repeats": lambda ids, at: repeats(input_ids=ids, cache_position=at),
    }
    ids, positions = tokens_of(case.batch, case.tokens), torch.arange(case.tokens) + case.held
    wanted = alone(ids, positions)
    calls = {arm: partial(step, ids, positions) for arm, step in arms.items()}
    print_ratios(f"{name} {tuple(ids.shape)}", calls, wanted, rounds)


def time_same_bits(folder: Path, dtype: str, rounds: int) -> None:
    """A process: time every arm, and let rank 0 print the ratios."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world, ids = dist.get_world_size(), tokens_of(1, 64)
    modules = {"plain": tpcompiler.load(folder / str(world))}
    for ranks in RANKS:
        if ranks % world == 0:
            modules[f"of {ranks}"] = tpcompiler.load(folder / str(ranks), same_bits=True)
    arms = {}
    for name, module in modules.items():
        calls = sum(node.op == "call_function" for node in module.exported_program.graph.nodes)
        arms[f"{name}, {calls} calls"] = partial(module, input_ids=ids)
    print_ratios(f"{dtype}, {world} processes", arms, modules["plain"](input_ids=ids), rounds, 0.1)


def print_ratios(
    call: str, arms: Mapping[str, Callable[[], Any]], wanted: Any, rounds: int, close: float = 1e-3
) -> None:
    """Run each arm in each round, in turn; let rank 0 print its time over that of the first arm."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(rounds + 2):
        names = list(arms)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            dist.barrier()
            if name == "one device" and dist.get_rank():
                continue
            began = time.perf_counter()
            made = arms[name]()
            if turn >= 2:
                times[name].append(time.perf_counter() - began)
            else:
                torch.testing.assert_close(made, wanted, rtol=close, atol=close)  # each is the same model
    if dist.get_rank() == 0:
        first, base = next(iter(times.items()))
        print(f"{call}: {statistics.median(base) * 1e3:.1f} ms {first}; ratios to that:")
        for name, own in times.items():
            ratios = sorted(one / other for one, other in zip(own, base, strict=True))
            low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
            print(f"  {name:18} {statistics.median(ratios):5.2f}   (half of the rounds: {low:.2f} to {high:.2f})")
    dist.destroy_process_group()


def tokens_of(*shape: int) -> torch.Tensor:
    return torch.arange(math.prod(shape)).reshape(shape) % 997


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("what", nargs="?", choices=("steps", "same-bits"), default="steps")
    options.add_argument("--rounds", type=int, default=15)
    options.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    asked = options.parse_args()
    warnings.simplefilter("ignore")
    if asked.worker:
        work = time_steps if asked.what == "steps" else time_same_bits
        work(Path(asked.worker[0]), asked.worker[1], asked.rounds)
        return
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        for name, processes in (prepare_steps if asked.what == "steps" else prepare_same_bits)(folder):
            launch = ("torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m")
            _run(*launch, "tools.bench_step", asked.what, "--worker", folder, name, "--rounds", asked.rounds)


def prepare_steps(folder: Path) -> Any:
    """Write the artifacts of each case, and yield its name and the number of processes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    checkpoint, models = folder / "checkpoint", folder / "models"
    LlamaForCausalLM(LlamaConfig(**SHAPE, architectures=["LlamaForCausalLM"])).save_pretrained(checkpoint)
    call = partial(_run, "tpcompiler.cli", stdout=subprocess.DEVNULL)
    plan = ("--tp", WORLD, "--plan", checkpoint / "config.json", "--checkpoint", checkpoint)
    for name, case in CASES.items():
        sizes = ("--batch", case.batch, "--max-length", ROOM)
        call("export", checkpoint, "--prefill-decode", *sizes, "-o", models)
        both = (models / "prefill.pt2", models / "decode.pt2", *plan)
        call("convert", *both, "-o", folder / name)
        call("convert", *both, "--keep-repeats", "-o", folder / f"{name}-repeats")
        call("package", folder / name, "--no-check")
        shutil.rmtree(models)
        yield name, WORLD


def prepare_same_bits(folder: Path) -> Any:
    """Write the artifacts of each dtype, and yield its name with each number of processes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    for dtype in ("float32", "bfloat16"):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**SMALL)).to(getattr(torch, dtype)).eval()
        program = torch.export.export(model, (), {"input_ids": tokens_of(1, 64)}, strict=False)
        for ranks in {1, *RANKS}:
            tpcompiler.parallelize(program, ranks, PLAN).save(folder / str(ranks), force=True)
        yield from ((dtype, world) for world in (2, 1))


def _run(module: str, *words: object, **options: Any) -> None:
    command = [sys.executable, "-m", module, *map(str, words)]
    subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, timeout=1800, **options)


if __name__ == "__main__":
    main()
