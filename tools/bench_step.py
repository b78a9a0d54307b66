"""How long a step takes: `python -m tools.bench_step [--rounds 15] [--layers 12]`, two gloo processes, a thread each.

A Llama of 100 million parameters, in float32, over a static cache: a prompt of (1, 256) tokens, and a step of (8, 1).
And, alone with `--train`, a step of training without a cache: forward and backward of (2, 256) tokens and their labels,
where the model by hand has Megatron's two autograd functions.
All arms run in the same two processes, in turn, round after round. What is printed is the median over the rounds of
each arm's time divided by that of the model that was sliced by hand, in the same round. `null` is that model once more:
by how much it differs from 1 is the noise. `one device` is the whole model on rank 0 while the other waits.

Also, of a fresh process for each rank: from its start to the first answer of the package.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

WORLD, LENGTH = 2, 320
CASES = {"prefill": (1, 256), "decode": (8, 1)}
TRAINED = (2, 256)
COLUMN = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROW = ("self_attn.o_proj", "mlp.down_proj")
Step = Callable[[torch.Tensor, torch.Tensor], Any]


def config_of(layers: int) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=layers,
        num_attention_heads=12,
        num_key_value_heads=12,
        head_dim=64,
        vocab_size=10_000,
        architectures=["LlamaForCausalLM"],
    )


def cached(model: Any, batch: int, heads: int) -> Step:
    """A model over a static cache of as many heads, as transformers exports it."""
    from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

    model.generation_config.cache_implementation, model.generation_config.use_cache = "static", True
    model.config.use_cache, before = True, model.config.num_key_value_heads
    model.config.num_key_value_heads = heads
    module = TorchExportableModuleWithStaticCache(model.eval(), batch, LENGTH, torch.device("cpu"))
    model.config.num_key_value_heads = before

    def step(ids: torch.Tensor, positions: torch.Tensor) -> Any:
        with torch.no_grad():
            return module(input_ids=ids, cache_position=positions)

    return step


def whole(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory)


class Copied(torch.autograd.Function):
    """Megatron's f, before column-wise layers: nothing forward, a sum of gradients backward."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        summed = gradients[0].contiguous()
        dist.all_reduce(summed)
        return summed


class Summed(torch.autograd.Function):
    """Megatron's g, behind row-wise layers: a sum forward, nothing backward."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(value)
        dist.all_reduce(value)
        return value

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


def sliced(directory: Path, trains: bool = False) -> Any:
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

    def reduce(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(output)
        return output

    for layer in made.model.layers if trains else ():
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.register_forward_hook(lambda module, args, output: Copied.apply(output))
        for last in (layer.self_attn.o_proj, layer.mlp.down_proj):
            last.register_forward_hook(lambda module, args, output: Summed.apply(output))
    for layer in made.model.layers if not trains else ():
        layer.self_attn.o_proj.register_forward_hook(reduce)
        layer.mlp.down_proj.register_forward_hook(reduce)
    return made


def with_dtensors(directory: Path) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

    model = whole(directory)
    styles: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in COLUMN}
    styles |= {name: RowwiseParallel() for name in ROW}
    plan = {f"model.layers.*.{name}": style for name, style in styles.items()}
    return parallelize_module(model, init_device_mesh("cpu", (WORLD,)), plan)


def by_transformers(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, tp_plan="auto")  # which asks for accelerate


def work(folder: Path, case: str, rounds: int) -> None:
    """A rank: time every arm, and let rank 0 print the ratios."""
    import tpcompiler

    warnings.simplefilter("ignore")
    batch, count = CASES[case]
    directory, artifact, heads = folder / "checkpoint", folder / case, 12 // WORLD
    plain, compiled = (tpcompiler.load(artifact, compiled=way)[case] for way in (False, True))
    hand, alone = cached(sliced(directory), batch, heads), cached(whole(directory), batch, heads * WORLD)
    arms: dict[str, Step] = {
        "hand": hand,
        "null": hand,
        "eager": lambda ids, at: plain(input_ids=ids, cache_position=at),
        "package": lambda ids, at: compiled(input_ids=ids, cache_position=at),
        "DTensor": cached(with_dtensors(directory), batch, heads),
        "one device": alone,
    }
    if importlib.util.find_spec("accelerate"):
        arms["transformers"] = cached(by_transformers(directory), batch, heads)
    ids = torch.arange(batch * count).reshape(batch, count) % 9_973
    positions = torch.arange(count) + (0 if case == "prefill" else 40)
    wanted = alone(ids, positions)
    times = timed({name: partial(arm, ids, positions) for name, arm in arms.items()}, wanted, rounds, case)
    if dist.get_rank() == 0:
        print(f"{case} {CASES[case]}: {statistics.median(times['hand']) * 1e3:.1f} ms by hand; ratios to that:")
        print_ratios(times)
        if "transformers" not in arms:
            print("  transformers' own: not run, for want of accelerate (pip install accelerate)")
    dist.destroy_process_group()


def train(folder: Path, rounds: int) -> None:
    """A rank: time forward and backward of every arm, and let rank 0 print the ratios."""
    import tpcompiler

    warnings.simplefilter("ignore")
    ours = tpcompiler.load(folder / "train", training=True)
    hand = sliced(folder / "checkpoint", trains=True).train()
    models: dict[str, Any] = {
        "hand": hand,
        "null": hand,
        "tpcompiler": ours,
        "DTensor": with_dtensors(folder / "checkpoint").train(),
        "one device": whole(folder / "checkpoint").train(),
    }
    ids = torch.arange(TRAINED[0] * TRAINED[1]).reshape(TRAINED) % 9_973

    def step(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
        model.zero_grad()
        results = model(input_ids=ids, labels=ids)
        results["loss"].backward()
        return results["loss"].detach(), model.get_parameter("model.norm.weight").grad

    arms = {name: partial(step, model) for name, model in models.items()}
    times = timed(arms, arms["one device"](), rounds, "train")
    if dist.get_rank() == 0:
        print(f"train {TRAINED}: {statistics.median(times['hand']) * 1e3:.1f} ms by hand; ratios to that:")
        print_ratios(times)
    dist.destroy_process_group()


def timed(arms: Mapping[str, Callable[[], Any]], wanted: Any, rounds: int, case: str) -> dict[str, list[float]]:
    """The seconds of each arm in each round, in turn; each is the same model."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    repeat = 5 if case == "decode" else 1
    for turn in range(rounds + 2):
        names = list(arms)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            dist.barrier()
            if name == "one device" and dist.get_rank():
                continue
            began = time.perf_counter()
            for _ in range(repeat):
                made = arms[name]()
            if turn >= 2:
                times[name].append((time.perf_counter() - began) / repeat)
            else:
                torch.testing.assert_close(made, wanted, rtol=1e-3, atol=1e-3)  # each is the same model
    return times


def print_ratios(times: Mapping[str, Sequence[float]]) -> None:
    for name, own in times.items():
        ratios = [one / other for one, other in zip(own, times["hand"], strict=True)]
        low, high = sorted(ratios)[len(ratios) // 4], sorted(ratios)[-1 - len(ratios) // 4]
        print(f"  {name:12} {statistics.median(ratios):5.2f}   (half of the rounds: {low:.2f} to {high:.2f})")


def start(artifact: Path, case: str) -> None:
    """A rank: from the start of its process, which torch has been imported in by now, to the first answer."""
    began = _age()
    import tpcompiler

    module = tpcompiler.load(artifact, compiled=True)[case]
    loaded = _age()
    batch, count = CASES[case]
    module(input_ids=torch.ones(batch, count, dtype=torch.int64), cache_position=torch.arange(count))
    answered = _age()
    if dist.get_rank() == 0:
        print(
            f"a rank: {began:.1f} s from the start of its process to torch, {loaded - began:.1f} s to load, "
            f"{answered - loaded:.2f} s for the first answer"
        )
    dist.destroy_process_group()


def _age() -> float:
    """Seconds since this process was started."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=15)
    options.add_argument("--layers", type=int, default=12)
    options.add_argument("--train", action="store_true", help="a step of training alone")
    options.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options.add_argument("--trainer", help=argparse.SUPPRESS)
    options.add_argument("--first", nargs=2, help=argparse.SUPPRESS)
    asked = options.parse_args()
    if asked.worker:
        work(Path(asked.worker[0]), asked.worker[1], asked.rounds)
        return 0
    if asked.trainer:
        train(Path(asked.trainer), asked.rounds)
        return 0
    if asked.first:
        start(Path(asked.first[0]), asked.first[1])
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        from transformers import LlamaForCausalLM

        torch.manual_seed(0)
        LlamaForCausalLM(config_of(asked.layers)).save_pretrained(folder / "checkpoint")
        prepare_training(folder)
        _torchrun("--trainer", folder, "--rounds", asked.rounds)
        for case, (batch, _) in CASES.items() if not asked.train else ():
            models = folder / "models"
            _tpcompiler(
                "export",
                folder / "checkpoint",
                "--prefill-decode",
                "--batch",
                batch,
                "--max-length",
                LENGTH,
                "-o",
                models,
            )
            plan = ("--plan", folder / "checkpoint" / "config.json", "--checkpoint", folder / "checkpoint")
            _tpcompiler(
                "convert", models / "prefill.pt2", models / "decode.pt2", "--tp", WORLD, *plan, "-o", folder / case
            )
            began = time.perf_counter()
            _tpcompiler("package", folder / case, "--no-check")
            print(f"package: {time.perf_counter() - began:.0f} s for two programs, once for {WORLD} ranks", flush=True)
            shutil.rmtree(models)
        for case in CASES if not asked.train else ():
            _torchrun("--worker", folder, case, "--rounds", asked.rounds)
        if not asked.train:
            _torchrun("--first", folder / "decode", "decode")
    return 0


def prepare_training(folder: Path) -> None:
    import tpcompiler

    ids = torch.arange(TRAINED[0] * TRAINED[1]).reshape(TRAINED) % 9_973
    model = whole(folder / "checkpoint").train()
    model.config.use_cache = False
    program = tpcompiler.export_training(model, kwargs={"input_ids": ids, "labels": ids})
    plan = dict.fromkeys([f"model.layers.*.{name}" for name in COLUMN], "colwise")
    plan |= dict.fromkeys([f"model.layers.*.{name}" for name in ROW], "rowwise")
    made = tpcompiler.parallelize(program, WORLD, plan)
    made.save(folder / "train")
    print(f"train: {len(made.collectives())} collectives", flush=True)


def _tpcompiler(*words: object) -> None:
    command = [sys.executable, "-m", "tpcompiler.cli", *map(str, words)]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True, timeout=1800)


def _torchrun(*words: object) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORLD}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    own = ["-m", "tools.bench_step", *map(str, words)]
    subprocess.run([*command, *own], env=environment, check=True, timeout=1800)


if __name__ == "__main__":
    sys.exit(main())
