"""Time the whole conversion of a Llama of 8B shape, without weights, beside its own torch.export.

    python tools/bench_convert.py --layers 32 --ranks 8 [--dynamic] [--save]

Prints seconds per part, the ratio of mark + partition (all ranks) to the export measured in the same run, and the peak
memory of the process. The graph is real; parameters are fake tensors, so no weight is ever held.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim
from transformers import LlamaConfig, LlamaForCausalLM

import tpcompiler
from passes.apply_plan import apply_plan
from passes.build_rank_program import build_rank_program
from passes.canonicalize import canonicalize
from passes.delay_reductions import delay_reductions
from passes.fold_reshards import fold_reshards
from passes.insert_reshards import insert_reshards
from passes.join_branches import join_branches
from passes.mark_placements import mark_placements
from passes.shard_state import shard_state
from tpcompiler.ir.mesh import Mesh
from tpcompiler.parallel_program import ParallelProgram
from tpcompiler.plan import Plan

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


def export(layers: int, dynamic: bool) -> torch.export.ExportedProgram:
    shape = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        use_cache=False,
    )
    with FakeTensorMode():
        model = LlamaForCausalLM(shape).eval()
        ids = torch.zeros(2, 256, dtype=torch.int64)
        sizes = {"input_ids": {0: Dim("batch"), 1: Dim("sequence")}} if dynamic else None
        with part("export"):
            return torch.export.export(model, (), {"input_ids": ids}, dynamic_shapes=sizes, strict=False)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--layers", type=int, default=32)
    options.add_argument("--ranks", type=int, default=8)
    options.add_argument("--dynamic", action="store_true", help="dynamic batch and sequence")
    options.add_argument("--save", action="store_true", help="also save and load the program, and save all ranks")
    chosen = options.parse_args()
    program = export(chosen.layers, chosen.dynamic)
    with tempfile.TemporaryDirectory() as folder:
        if chosen.save:
            torch.export.save(program, Path(folder) / "model.pt2")
            with part("load"):
                # Timed only: torch loads a weightless file with all equal shapes in one storage, as if they were tied.
                torch.export.load(Path(folder) / "model.pt2")
        with part("canonicalize"):
            canonical = canonicalize(program)
        with part("mark"):
            marked = mark_placements(join_branches(apply_plan(canonical, Plan.of(PLAN), Mesh.of(chosen.ranks))))
        with part("partition"):
            resharded = fold_reshards(delay_reductions(insert_reshards(marked)))
            made = ParallelProgram(program, resharded, Plan.of(PLAN), "cpu")
            local = [made.local_program(rank) for rank in range(chosen.ranks)]
        with part("shard + build"):
            built = [build_rank_program(shard_state(one)) for one in local]
        if chosen.save:
            with part("save"):
                for rank, rank_program in enumerate(built):
                    torch.export.save(rank_program, Path(folder) / f"rank_{rank}.pt2")
    counts: dict[str, int] = {}
    for collective in made.collectives():
        counts[collective.kind] = counts.get(collective.kind, 0) + 1
    print(f"tpcompiler {tpcompiler.__version__}, torch {torch.__version__}")
    print(f"{chosen.layers} layers, {chosen.ranks} ranks, {'dynamic' if chosen.dynamic else 'static'} shapes,", end=" ")
    print(f"{len(local[0].graph.nodes)} nodes per rank, collectives {counts}")
    for name, seconds in times.items():
        print(f"  {name:14} {seconds:7.2f} s")
    ratio = (times["mark"] + times["partition"]) / times["export"]
    print(f"  (mark + partition of all ranks) / export: {ratio:.2f}")
    print(f"  peak memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")


if __name__ == "__main__":
    main()
