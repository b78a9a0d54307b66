"""Predicted against measured, on this machine: `python -m tools.bench_cost [--machine here.yaml] [NAME ...]`.

Ten models of tests/zoo, each converted for two ranks by the plan that a person wrote, by the search for an H100, and
with every layer whole. All programs run in the same two gloo processes, one thread each, in turn, round after round;
the median counts. Step times are predicted by `solver/step_time.py` for a machine that is measured first, unless a file
is given. The rank correlation (Spearman) is over the plans of each model, and over all programs. Wire bytes are those
that were predicted, and those that the calls sent.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from scipy.stats import spearmanr

import tpcompiler
from tests.launch import run_ranks
from tests.zoo.index import CASES
from tools.bench_comm import WireMode
from tpcompiler.api import conversions_of, read_plan
from tpcompiler.calibrate import measure_machine
from tpcompiler.cost.machine import Machine
from tpcompiler.cost.machine_file import read_machine
from tpcompiler.pipeline import solved_together
from tpcompiler.runtime.inputs import read_inputs, write_tensors
from tpcompiler.solver.step_time import measure_step_time

WORLD, ROUNDS = 2, 41
NAMES = ["llama", "gpt2", "gpt_neox", "bert", "minilm", "qwen3_moe", "vit", "resnet", "bloom", "falcon_7b"]


def predicted(name: str, plan: Any, machine: Machine, folder: Path) -> tuple[float, int]:
    """Seconds and wire bytes of a step, after the artifact is written."""
    case = CASES[name]
    conversions = conversions_of(case.export(False), WORLD, read_plan(plan))
    found, made = solved_together(conversions)
    made[""].save(folder)
    write_tensors(folder.parent / f"{folder.name}.safetensors", case.inputs(*case.example))
    sent = [(each.kind, each.group_size, each.wire_bytes) for each in made[""].collectives()]
    return measure_step_time(found, sent, machine, fused=False).total, sum(count for _, _, count in sent)


def work(folder: Path, arms: Sequence[str]) -> None:
    """A rank: run all programs, and write what rank 0 measured."""
    modules, sent, took = {}, dict[str, int](), dict[str, list[float]]()
    for arm in arms:
        module = tpcompiler.load(folder / arm)
        args, kwargs = read_inputs(folder / f"{arm}.safetensors", module.exported_program)
        modules[arm] = module, args, kwargs
        with torch.no_grad(), WireMode(WORLD) as mode:
            module(*args, **kwargs)
        sent[arm] = mode.bytes
    for _ in range(ROUNDS):
        for arm, (module, args, kwargs) in modules.items():
            dist.barrier()
            began = time.perf_counter()
            with torch.no_grad():
                module(*args, **kwargs)
            took.setdefault(arm, []).append(time.perf_counter() - began)
    if dist.get_rank() == 0:
        seconds = {arm: statistics.median(own) for arm, own in took.items()}
        (folder / "measured.json").write_text(json.dumps({"seconds": seconds, "bytes": sent}))


def main(words: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("names", nargs="*", help="models of tests/zoo")
    options.add_argument("--machine", help="a file; without one, this machine is measured")
    options.add_argument("--work", help=argparse.SUPPRESS)
    asked = options.parse_args(words)
    warnings.simplefilter("ignore")
    if asked.work:
        work(Path(asked.work), asked.names)
        return 0
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        (folder / "here.yaml").write_text("" if asked.machine else measure_machine(WORLD))
        machine, rows = read_machine(asked.machine or folder / "here.yaml"), dict[str, tuple[float, int]]()
        names = asked.names or NAMES
        for name in names:
            plans = {"person": CASES[name].asked(), "auto": "auto", "whole": {"**": "replicate"}}
            for kind, plan in plans.items():
                rows[f"{name}.{kind}"] = predicted(name, plan, machine, folder / f"{name}.{kind}")
        run_ranks(WORLD, Path(__file__), "--work", folder, *rows, timeout=600)
        measured = json.loads((folder / "measured.json").read_text())
    table = Table("program", *("predicted ms", "measured ms", "predicted bytes", "sent bytes"), box=None)
    for arm, (seconds, count) in rows.items():
        took, sent = measured["seconds"][arm], measured["bytes"][arm]
        table.add_row(arm, f"{seconds * 1e3:.3f}", f"{took * 1e3:.3f}", f"{count:,}", f"{sent:,}")
    Console(width=100).print(table)
    for name in [*names, ""]:
        arms = [arm for arm in rows if arm.startswith(f"{name}." if name else "")]
        found = spearmanr([rows[arm][0] for arm in arms], [measured["seconds"][arm] for arm in arms]).statistic
        print(f"rank correlation, {name or 'all'}: {found:.2f}")
    wrong = [arm for arm, (_, sent) in rows.items() if sent != measured["bytes"][arm]]
    print(f"wire bytes: {f'wrong for {wrong}' if wrong else 'equal'}")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
