"""How long a step takes: `python -m tools.bench_step [--rounds 15] [--layers 12]`, two gloo processes, a thread each.

A Llama of 100 million parameters, in float32, over a static cache: a prompt of (1, 256) tokens, and a step of (8, 1).
Narrow layers with the heads of Llama 3 8B, 4 queries to a head of keys, over a cache of 2,048 tokens: steps of (1, 1)
and (8, 1) and a prompt of (1, 256), alone with `--cache`; `repeats` is converted with `--keep-repeats`. And, alone with
`--train`, a step of training without a cache: forward and backward of (2, 256) tokens and their labels, where the model
by hand has Megatron's two autograd functions.
All arms run in the same two processes, in turn, round after round. What is printed is the median over the rounds of
each arm's time divided by that of the model that was sliced by hand, in the same round. `null` is that model once more:
by how much it differs from 1 is the noise. `one device` is the whole model on rank 0 while the other waits.
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
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

WORLD = 2


class Case(NamedTuple):
    """A call: its batch and tokens, the tokens that its cache can hold and holds already, and the model's shape."""

    batch: int
    tokens: int
    room: int = 320
    held: int = 0
    shape: Mapping[str, int] = {}

    @property
    def checkpoint(self) -> str:
        return "grouped" if self.shape else "checkpoint"


PLAIN = {
    **{"hidden_size": 768, "intermediate_size": 2048, "vocab_size": 10_000},
    **{"num_attention_heads": 12, "num_key_value_heads": 12, "head_dim": 64},
}
GROUPED = {
    **{"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 4},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
}
CASES = {
    "prefill": Case(1, 256),
    "decode": Case(8, 1, held=40),
    "cache": Case(1, 1, 2048, 2000, GROUPED),
    "cache-8": Case(8, 1, 2048, 2000, GROUPED),
    "prompt": Case(1, 256, 2048, 0, GROUPED),
}
TRAINED = (2, 256)
COLUMN = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROW = ("self_attn.o_proj", "mlp.down_proj")
Step = Callable[[torch.Tensor, torch.Tensor], Any]


def cached(model: Any, case: Case, ranks: int = 1) -> Step:
    """A model over a static cache of a rank's heads, as transformers exports it."""
    from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

    model.generation_config.cache_implementation, model.generation_config.use_cache = "static", True
    model.config.use_cache, before = True, model.config.num_key_value_heads
    model.config.num_key_value_heads = before // ranks
    module = TorchExportableModuleWithStaticCache(model.eval(), case.batch, case.room, torch.device("cpu"))
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

    def reduce(output: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(output)
        return output

    for layer in made.model.layers:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm) if trains else ():
            norm.register_forward_hook(lambda module, args, output: Copied.apply(output))
        for last in (layer.self_attn.o_proj, layer.mlp.down_proj):
            last.register_forward_hook(lambda module, args, output: (Summed.apply if trains else reduce)(output))
    return made


def with_dtensors(directory: Path) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

    model = whole(directory)
    styles: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in COLUMN}
    styles |= {name: RowwiseParallel() for name in ROW}
    plan = {f"model.layers.*.{name}": style for name, style in styles.items()}
    return parallelize_module(model, init_device_mesh("cpu", (WORLD,)), plan)


def work(folder: Path, name: str, rounds: int) -> None:
    """A rank: time every arm, and let rank 0 print the ratios."""
    import tpcompiler

    warnings.simplefilter("ignore")
    case = CASES[name]
    directory, artifact = folder / case.checkpoint, folder / name
    program = "decode" if case.tokens == 1 else "prefill"
    plain, compiled = (tpcompiler.load(artifact, compiled=way)[program] for way in (False, True))
    hand, alone = cached(sliced(directory), case), cached(whole(directory), case)
    arms: dict[str, Step] = {
        "hand": hand,
        "null": hand,
        "eager": lambda ids, at: plain(input_ids=ids, cache_position=at),
        "package": lambda ids, at: compiled(input_ids=ids, cache_position=at),
        "DTensor": cached(with_dtensors(directory), case, WORLD),
        "one device": alone,
    }
    if case.shape:
        repeats = tpcompiler.load(folder / f"{name}-repeats")[program]
        arms["repeats"] = lambda ids, at: repeats(input_ids=ids, cache_position=at)
    ids = tokens_of(case.batch, case.tokens)
    positions = torch.arange(case.tokens) + case.held
    wanted = alone(ids, positions)
    calls = {arm: partial(step, ids, positions) for arm, step in arms.items()}
    print_ratios(f"{name} {tuple(ids.shape)}", timed(calls, wanted, rounds, 5 if name == "decode" else 1))


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
    ids = tokens_of(*TRAINED)

    def step(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
        model.zero_grad()
        results = model(input_ids=ids, labels=ids)
        results["loss"].backward()
        return results["loss"].detach(), model.get_parameter("model.norm.weight").grad

    arms = {name: partial(step, model) for name, model in models.items()}
    print_ratios(f"train {tuple(ids.shape)}", timed(arms, arms["one device"](), rounds, 1))


def timed(arms: Mapping[str, Callable[[], Any]], wanted: Any, rounds: int, repeat: int) -> dict[str, list[float]]:
    """The seconds of each arm in each round, in turn; each is the same model."""
    times: dict[str, list[float]] = {name: [] for name in arms}
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


def print_ratios(call: str, times: Mapping[str, Sequence[float]]) -> None:
    """Let rank 0 print each arm's time over that of the model that was sliced by hand."""
    if dist.get_rank() == 0:
        print(f"{call}: {statistics.median(times['hand']) * 1e3:.1f} ms by hand; ratios to that:")
        for name, own in times.items():
            ratios = sorted(one / other for one, other in zip(own, times["hand"], strict=True))
            low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
            print(f"  {name:12} {statistics.median(ratios):5.2f}   (half of the rounds: {low:.2f} to {high:.2f})")
    dist.destroy_process_group()


def tokens_of(*shape: int) -> torch.Tensor:
    return torch.arange(math.prod(shape)).reshape(shape) % 9_973


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=15)
    options.add_argument("--layers", type=int, default=12)
    options.add_argument("--train", action="store_true", help="a step of training alone")
    options.add_argument("--cache", action="store_true", help="the steps over a long cache alone")
    options.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    asked = options.parse_args()
    if asked.worker:
        folder, name = Path(asked.worker[0]), asked.worker[1]
        train(folder, asked.rounds) if name == "train" else work(folder, name, asked.rounds)
        return 0
    from transformers import LlamaConfig, LlamaForCausalLM

    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        torch.manual_seed(0)
        cases = {name: case for name, case in CASES.items() if not asked.train and (not asked.cache or case.shape)}
        shapes = {case.checkpoint: case.shape for case in cases.values()} or {"checkpoint": {}}
        for checkpoint, shape in shapes.items():
            sizes: dict[str, Any] = {**PLAIN, "num_hidden_layers": asked.layers, **shape}
            config = LlamaConfig(**sizes, architectures=["LlamaForCausalLM"])
            LlamaForCausalLM(config).save_pretrained(folder / checkpoint)
        if not asked.cache:
            prepare_training(folder)
        for name, case in cases.items():
            _prepare(folder, name, case)
        for name in ([] if asked.cache else ["train"]) + list(cases):
            launch = ["torch.distributed.run", "--standalone", f"--nproc-per-node={WORLD}", "-m", "tools.bench_step"]
            _run(*launch, "--worker", folder, name, "--rounds", asked.rounds)
    return 0


def _prepare(folder: Path, name: str, case: Case) -> None:
    call = partial(_run, "tpcompiler.cli", stdout=subprocess.DEVNULL)
    models, checkpoint = folder / "models", folder / case.checkpoint
    sizes = ("--batch", case.batch, "--max-length", case.room)
    call("export", checkpoint, "--prefill-decode", *sizes, "-o", models)
    plan = ("--plan", checkpoint / "config.json", "--checkpoint", checkpoint)
    both = (models / "prefill.pt2", models / "decode.pt2", "--tp", WORLD, *plan)
    call("convert", *both, "-o", folder / name)
    if case.shape:
        call("convert", *both, "--keep-repeats", "-o", folder / f"{name}-repeats")
    began = time.perf_counter()
    call("package", folder / name, "--no-check")
    print(f"package: {time.perf_counter() - began:.0f} s for two programs, once for {WORLD} ranks", flush=True)
    shutil.rmtree(models)


def prepare_training(folder: Path) -> None:
    import tpcompiler

    ids = tokens_of(*TRAINED)
    model = whole(folder / "checkpoint").train()
    model.config.use_cache = False
    program = tpcompiler.export_training(model, kwargs={"input_ids": ids, "labels": ids})
    plan = dict.fromkeys([f"model.layers.*.{name}" for name in COLUMN], "colwise")
    plan |= dict.fromkeys([f"model.layers.*.{name}" for name in ROW], "rowwise")
    made = tpcompiler.parallelize(program, WORLD, plan)
    made.save(folder / "train")
    print(f"train: {len(made.collectives())} collectives", flush=True)


def _run(module: str, *words: object, **options: Any) -> None:
    command = [sys.executable, "-m", module, *map(str, words)]
    subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, timeout=1800, **options)


if __name__ == "__main__":
    sys.exit(main())
