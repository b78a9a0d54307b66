"""Time the whole conversion of a Llama of 8B shape, without weights, beside its own torch.export.

    python -m tools.bench_convert --layers 32 --ranks 8 [--dynamic] [--save] [--train]

Prints seconds per pass, and the ratio of all of it (`parallelize`, and every rank's program) to the export, which is
measured in the same run; with --save, also of writing all ranks, check included. With --train the program has a loss
and all gradients, and the export is `tpcompiler.export_training`. The graph is real; weights are fake tensors, of which
none is ever held.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.export import Dim

import tpcompiler
from tpcompiler.parallel.conversion import Dump
from tpcompiler.runtime.weightless import weightless

PLAN = {
    "model.embed_tokens": "embedding_rowwise",
    "model.layers.*.self_attn.q_proj": "colwise",
    "model.layers.*.self_attn.k_proj": "colwise",
    "model.layers.*.self_attn.v_proj": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.mlp.gate_proj": "colwise",
    "model.layers.*.mlp.up_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
    "lm_head": "colwise_gather_output",
}

times: dict[str, float] = {}


@contextmanager
def part(name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    times[name] = times.get(name, 0.0) + time.perf_counter() - start


class Timer:
    """Called after every pass, in place of what dumps its text: how long it took."""

    def __init__(self) -> None:
        self.last = time.perf_counter()

    def __call__(self, made: Any, name: str) -> Any:
        now = time.perf_counter()
        times[name] = times.get(name, 0.0) + now - self.last
        self.last = now
        return made


def export(layers: int, dynamic: bool, train: bool = False) -> torch.export.ExportedProgram:
    from transformers import LlamaConfig, LlamaForCausalLM  # takes seconds, which importers of PLAN need not spend

    shape = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        use_cache=False,
    )
    with weightless():
        model = LlamaForCausalLM(shape).train(train)
        ids = torch.zeros(2, 256, dtype=torch.int64)
        example = {"input_ids": ids, "labels": ids} if train else {"input_ids": ids}
        sizes = {name: {0: Dim("batch"), 1: Dim("sequence")} for name in example} if dynamic else None
        with part("export"):
            if train:
                return tpcompiler.export_training(model, kwargs=example, dynamic_shapes=sizes)
            return torch.export.export(model, (), example, dynamic_shapes=sizes, strict=False)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--layers", type=int, default=32)
    options.add_argument("--ranks", type=int, default=8)
    options.add_argument("--dynamic", action="store_true", help="dynamic batch and sequence")
    options.add_argument("--save", action="store_true", help="also write all ranks")
    options.add_argument("--train", action="store_true", help="a program with loss and gradients")
    chosen = options.parse_args()
    program = export(chosen.layers, chosen.dynamic, chosen.train)
    started = time.perf_counter()
    with patch.object(Dump, "__call__", staticmethod(Timer())):
        made = tpcompiler.parallelize(program, chosen.ranks, PLAN)
    with part("rank programs"):
        built = [made.rank_program(rank) for rank in range(chosen.ranks)]
    total = time.perf_counter() - started
    if chosen.save:
        with tempfile.TemporaryDirectory() as folder, part("save and check"):
            made.save(Path(folder) / "out")
    counts: dict[str, int] = {}
    for collective in made.collectives():
        counts[collective.kind] = counts.get(collective.kind, 0) + 1
    print(f"tpcompiler {tpcompiler.__version__}, torch {torch.__version__}")
    print(f"{chosen.layers} layers, {chosen.ranks} ranks, {'dynamic' if chosen.dynamic else 'static'} shapes,", end=" ")
    print(f"{len(built[0].graph.nodes)} nodes per rank, collectives {counts}")
    for name, seconds in times.items():
        print(f"  {name:18} {seconds:7.2f} s")
    print(f"  conversion of all ranks / export: {total:.2f} / {times['export']:.2f} = {total / times['export']:.2f}")
    print(f"  peak memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")


if __name__ == "__main__":
    main()
