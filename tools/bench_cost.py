"""Predicted against measured, on this machine: `python -m tools.bench_cost [--ranks 2 4] [--machine FILE] [NAME ...]`.

The machine is calibrated first, for as many gloo processes, one thread each. Each model of tools/bench_models.py is
converted by four plans: the one that a person wrote (`hand`), the one that the search finds for this machine (`auto`),
and two that are worse: each planned layer column-parallel with a gathered output (`gathered`), and none cut (`whole`).
Each is predicted from what is written, as all commands predict it, and measured as users run it: loaded from the
artifact by all processes, in turn, round after round, of which the median counts. Ratios are medians over the rounds.
`null` is the plan by hand once more, loaded beside it: by how much its ratio differs from 1 is the noise.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from scipy.stats import spearmanr
from torch.export import ExportedProgram

import tpcompiler
from tests.launch import run_ranks
from tools.bench_models import SUBJECTS
from tpcompiler.api import conversions_of, read_calls, read_plan
from tpcompiler.api.calibrate import measure_machine
from tpcompiler.api.parallel_program import ParallelProgram
from tpcompiler.cost.machine import Machine
from tpcompiler.cost.machine_file import read_machine
from tpcompiler.parallel.pipeline import convert_programs
from tpcompiler.runtime.artifact import SINGLE
from tpcompiler.runtime.inputs import read_inputs, write_tensors
from tpcompiler.solver.task import Aim

NAMES = list(SUBJECTS)
NULL, PLANS = "null", ("hand", "auto", "gathered", "whole")
SECONDS, LEAST, MOST = 12.0, 11, 201  # of measuring a model; rounds
WARM = 2  # rounds that do not count
OVERALL, WITHIN, NOISE = 0.95, 0.8, 0.03  # the least correlations wanted; by how much a ratio may be above 1


class Arm(NamedTuple):
    """A plan of a model: predicted seconds of a step, and those of each round, of the rank that took longest."""

    plan: str
    predicted: float
    rounds: Sequence[float]

    @property
    def measured(self) -> float:
        return statistics.median(self.rounds)


class Result(NamedTuple):
    """A model's plans, and its plan by hand once more."""

    model: str
    arms: Sequence[Arm]
    null: Sequence[float]

    @property
    def correlation(self) -> float:
        return rank_correlation(self.arms)

    def ratio(self, plan: str) -> float:
        """The median over the rounds of a plan's time divided by that of the plan by hand."""
        rounds = {arm.plan: arm.rounds for arm in self.arms} | {NULL: self.null}
        return statistics.median(one / hand for one, hand in zip(rounds[plan], rounds["hand"], strict=True))


def rank_correlation(arms: Sequence[Arm]) -> float:
    """Spearman's, of predicted and measured times; equal predictions share a rank."""
    return float(spearmanr([arm.predicted for arm in arms], [arm.measured for arm in arms]).statistic)


def plans_of(by_hand: Mapping[str, object]) -> dict[str, Any]:
    """The four plans of a model, given the one by hand."""
    gathered = {name: "colwise_gather_output" if _is_layer(style) else style for name, style in by_hand.items()}
    return {"hand": by_hand, "auto": "auto", "gathered": gathered, "whole": {"**": "replicate"}}


def _is_layer(style: Any) -> bool:
    """True for a style that cuts a layer's features."""
    name = style.get("style") if isinstance(style, Mapping) else style
    return name in ("colwise", "rowwise", "colwise_gather_output")


def write(
    programs: Mapping[str, ExportedProgram],
    calls: Mapping[str, int],
    plan: Any,
    ranks: int,
    machine: Machine,
    folder: Path,
) -> float:
    """Write an artifact by this plan; return the predicted seconds of a step."""
    conversions = conversions_of(programs.get(SINGLE, programs), ranks, read_plan(plan))
    _, made = convert_programs(conversions, Aim(machine, calls=tuple(read_calls(calls, conversions).values())))
    ParallelProgram(made).save(folder)
    return sum(calls[name] * own.predict(machine).total.total for name, own in made.items())


def work(folder: Path, seconds: float) -> None:
    """A rank: run all arms round after round; rank 0 writes what each round took the slowest rank."""
    steps = {arm: _load(folder, arm) for arm in (*PLANS, NULL)}
    took, names, rounds, began = dict[str, list[float]](), list(steps), MOST, 0.0
    while (done := len(took.get(NULL, ()))) < rounds + WARM:
        if done == WARM:
            began = time.perf_counter()
        elif done == WARM + LEAST:  # as many as there is time for, on every rank
            left = torch.tensor(seconds / (time.perf_counter() - began) * LEAST)
            dist.broadcast(left, 0)
            rounds = min(MOST, max(LEAST, int(left)))
        for arm in names[done % len(names) :] + names[: done % len(names)]:
            dist.barrier()
            start = time.perf_counter()
            for module, args, kwargs in steps[arm]:
                module(*args, **kwargs)
            took.setdefault(arm, []).append(time.perf_counter() - start)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, took)
    if dist.get_rank() == 0:
        slowest = {arm: [max(each) for each in zip(*(own[arm] for own in found), strict=True)][WARM:] for arm in took}
        (folder / "measured.json").write_text(json.dumps(slowest))


def _load(folder: Path, arm: str) -> list[Any]:
    """The calls of a step."""
    loaded = tpcompiler.load(folder / (PLANS[0] if arm == NULL else arm))
    modules = loaded if isinstance(loaded, dict) else {SINGLE: loaded}
    calls = json.loads((folder / "calls.json").read_text())
    found = []
    for name, module in modules.items():
        args, kwargs = read_inputs(folder / f"{name}.safetensors", module.exported_program)
        found += [(module, args, kwargs)] * calls[name]
    return found


def measure(name: str, ranks: int, machine: Machine, seconds: float, folder: Path) -> Result:
    """Convert a model by each plan, and time all of them on gloo processes."""
    subject = SUBJECTS[name]
    exported = subject.export()
    programs = {each: program for each, (program, _) in exported.items()}
    predicted = {
        arm: write(programs, subject.calls, plan, ranks, machine, folder / arm)
        for arm, plan in plans_of(subject.plan()).items()
    }
    for program, (_, inputs) in exported.items():
        write_tensors(folder / f"{program}.safetensors", inputs)
    (folder / "calls.json").write_text(json.dumps(subject.calls))
    run_ranks(ranks, Path(__file__), "--work", folder, "--seconds", str(seconds), timeout=300 + 10 * seconds)
    measured = json.loads((folder / "measured.json").read_text())
    return Result(name, [Arm(plan, predicted[plan], measured[plan]) for plan in PLANS], measured[NULL])


def table(results: Sequence[Result]) -> Table:
    """A row for each plan of each model."""
    made = Table("model", "plan", "predicted ms", "measured ms", "to hand", "rank corr.", "null", box=None)
    for column in made.columns[2:]:
        column.justify = "right"
    for result in results:
        for arm in result.arms:
            first = arm.plan == "hand"
            row = [f"{arm.predicted * 1e3:.2f}", f"{arm.measured * 1e3:.2f}", f"{result.ratio(arm.plan):.3f}"]
            row += [f"{result.correlation:.2f}", f"{result.ratio(NULL):.3f}"] if first else []
            made.add_row(result.model if first else "", arm.plan, *row)
    return made


def summary(results: Sequence[Result]) -> list[str]:
    """What all models say of the prediction, beside what is wanted of it."""
    every = rank_correlation([arm for result in results for arm in result.arms])
    within = [result for result in results if round(result.correlation, 3) >= WITHIN]
    slow = [result.model for result in results if result.ratio("auto") > 1 + NOISE]
    noisy = [result.model for result in results if abs(result.ratio(NULL) - 1) > NOISE]
    errors = [abs(math.log(arm.predicted / arm.measured)) for result in results for arm in result.arms]
    worst = max(result.ratio("auto") for result in results)
    return [
        f"rank correlation over all {len(errors)} programs: {every:.3f} (wanted: {OVERALL})",
        f"within a model at least {WITHIN}: {len(within)} of {len(results)}",
        f"auto above {1 + NOISE} of the plan by hand: {', '.join(slow) or 'none'}; at worst {worst:.3f}",
        f"null control outside of {1 - NOISE} to {1 + NOISE}: {', '.join(noisy) or 'none'}",
        f"measured and predicted differ by a factor of {math.exp(statistics.fmean(errors)):.2f} on average",
    ]


def main(words: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; without one, all")
    options.add_argument("--ranks", nargs="+", type=int, default=[2], help="numbers of gloo processes")
    options.add_argument("--machine", help="a file; without one, this machine is calibrated")
    options.add_argument("--seconds", type=float, default=SECONDS, help="of measuring each model")
    options.add_argument("--work", help=argparse.SUPPRESS)
    asked = options.parse_args(words)
    if unknown := set(asked.names) - set(NAMES):
        options.error(f"there is no model {min(unknown)!r}; there are {', '.join(NAMES)}")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if asked.work:
        work(Path(asked.work), asked.seconds)
        return 0
    for ranks in asked.ranks:
        results = []
        with tempfile.TemporaryDirectory() as directory:
            folder, file = Path(directory), Path(directory, "here.yaml")
            if not asked.machine:
                file.write_text(measure_machine(ranks))
                print(file.read_text(), flush=True)
            machine = read_machine(asked.machine or file)
            for name in asked.names or NAMES:
                results.append(measure(name, ranks, machine, asked.seconds, folder / name))
                shutil.rmtree(folder / name)
                Console(width=100).print(table(results[-1:]))
        print(f"\n{ranks} ranks; {os.getloadavg()[0]:.1f} processes ran on {os.cpu_count()} cores in the last minute")
        Console(width=100).print(table(results))
        print("\n".join(summary(results)), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
