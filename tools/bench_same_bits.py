"""What the same bits cost: `python -m tools.bench_same_bits [--rounds 25]`, gloo on this machine, a thread each.

A Llama of 4 layers, 64 tokens. On two processes and on one, a call of each arm in turn, round after round; printed is
the median over the rounds of each arm's time divided by that of plain programs for as many ranks as processes, in the
same round, and the calls of ops of a process. `of 2` on 2 processes is the price of the tree alone.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import tpcompiler
from tools.bench_convert import PLAN

RANKS = (2, 4, 8)  # of the artifacts that run on fewer processes
CONFIG = LlamaConfig(
    vocab_size=1024,
    hidden_size=512,
    intermediate_size=1024,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=8,
    use_cache=False,
)


def write_artifacts(directory: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, ids = LlamaForCausalLM(CONFIG), torch.randint(1024, (1, 64))
    torch.nn.Module.to(model, dtype).eval()
    program = torch.export.export(model, (), {"input_ids": ids}, strict=False)
    for ranks in {1, *RANKS}:
        tpcompiler.parallelize(program, ranks, PLAN).save(directory / str(ranks))


def time_arms(directory: Path, rounds: int) -> None:
    """Print a row for each arm, on the processes of this world."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    arms = {"plain": tpcompiler.load(directory / str(world))}
    for ranks in RANKS:
        if ranks % world == 0:
            arms[f"of {ranks}"] = tpcompiler.load(directory / str(ranks), same_bits=True)
    ids, times = torch.randint(1024, (1, 64)), {name: list[float]() for name in arms}
    for _ in range(rounds):
        for name, module in arms.items():
            dist.barrier()
            start = time.perf_counter()
            module(input_ids=ids)
            times[name].append(time.perf_counter() - start)
    if dist.get_rank() == 0:
        for name, own in times.items():
            ratio = statistics.median(a / b for a, b in zip(own[3:], times["plain"][3:], strict=True))
            calls = sum(node.op == "call_function" for node in arms[name].exported_program.graph.nodes)
            print(f"{world} processes  {name:6} {ratio:5.2f}  {calls:5} calls", flush=True)


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.bench_same_bits", description=__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    if given.worker is not None:
        time_arms(given.worker, given.rounds)
        return
    for dtype in (torch.float32, torch.bfloat16):
        with tempfile.TemporaryDirectory() as folder:
            write_artifacts(Path(folder), dtype)
            print(dtype, flush=True)
            for world in (2, 1):
                start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world), "-m"]
                own = ["tools.bench_same_bits", "--worker", folder, "--rounds", str(given.rounds)]
                subprocess.run([*start, *own], check=True, timeout=900)


if __name__ == "__main__":
    main(sys.argv[1:])
