"""Placements without a plan beside the plans that people wrote, on the tests' models; and how long the search takes.

    python -m tools.bench_auto [--mesh dp=2,tp=2] [--machine ideal] [NAME ...]
    python -m tools.bench_auto --layers 32 80 --mesh tp=8

For each model: the predicted time of a call and the bytes of weights on the rank that holds most, of both. What
`plan="auto"` gives is compared with the single device, and with what the plan that it found gives. With --layers the
search is timed on a Llama of 8B shape, beside its torch.export.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

import tpcompiler
from tests.zoo.found import from_file, written
from tests.zoo.index import CASES
from tools.bench_convert import export, times
from tpcompiler.cli.options import read_mesh
from tpcompiler.cost.machine import Machine
from tpcompiler.cost.machine_file import read_machine
from tpcompiler.cost.objective import Objective
from tpcompiler.cost.timeline import duration
from tpcompiler.errors import TpCompilerError
from tpcompiler.ir.gc_pause import collector_rests
from tpcompiler.ir.mesh import Mesh
from tpcompiler.passes.apply_plan import apply_plan
from tpcompiler.passes.canonicalize import canonicalize
from tpcompiler.passes.divide_sizes import divide_sizes
from tpcompiler.passes.regions.join_branches import join_branches
from tpcompiler.plan.plan import Plan
from tpcompiler.solver.search import PLACING, solve
from tpcompiler.solver.task import Task


def compare(name: str, mesh: Mesh, machine: Machine) -> str:
    """A line about one model; the verdict is its last word."""
    case = CASES[name]
    program = case.export(False)
    try:
        auto = tpcompiler.parallelize(program, mesh, "auto", machine=machine.name)
        if not auto.verify((), case.inputs(*case.example)).ok:
            return f"{name}: the numbers are WRONG"
        by_hand = tpcompiler.parallelize(program, mesh, case.asked(), machine=machine.name)
        with tempfile.TemporaryDirectory() as folder:
            if written(from_file(program, mesh, Path(folder), machine=machine.name)) != written(auto):
                return f"{name}: the plan that was found gives ANOTHER program"
    except TpCompilerError as error:
        return f"{name}: {type(error).__name__}: {str(error).splitlines()[0]}: refused"
    ours, theirs = (each.converted.predict(machine).total.total for each in (auto, by_hand))
    verdict = "the-same" if ours == theirs else "faster" if ours < theirs else "slower"
    held = [max(each.parameter_bytes()[1]) for each in (auto, by_hand)]
    return (
        f"{name}: {duration(ours)} of {duration(theirs)} by hand ({ours / theirs:.3f}), weights {held[0]:,} of "
        f"{held[1]:,}: {verdict}"
    )


@collector_rests()
def time_search(layers: int, mesh: Mesh) -> str:
    program = canonicalize(export(layers, dynamic=False))
    planned = divide_sizes(join_branches(apply_plan(program, Plan().with_search(), mesh)))
    started = time.perf_counter()
    found = solve(Task([planned], Objective.of(read_machine())), PLACING)
    taken = time.perf_counter() - started
    styles = Counter(str(style) for style in found.styles.values())
    return (
        f"{layers} layers of 8B shape, {mesh}: stated and solved in {taken:.2f} s; torch.export took "
        f"{times.pop('export'):.2f} s; {len(found.choices)} ops, {dict(styles)}"
    )


def main(words: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("names", nargs="*", help="models of tests/zoo; without one, all")
    options.add_argument("--mesh", default="tp=2")
    options.add_argument("--machine", default="h100")
    options.add_argument("--layers", type=int, nargs="*", help="time the search instead")
    asked = options.parse_args(words)
    mesh, machine = read_mesh(None, asked.mesh), read_machine(asked.machine)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for layers in asked.layers or ():
        print(time_search(layers, mesh), flush=True)
    if asked.layers:
        return 0
    counts: Counter[str] = Counter()
    for name in asked.names or CASES:
        line = compare(name, mesh, machine)
        counts[line.rpartition(" ")[2]] += 1
        print(line, flush=True)
    print(
        f"{sum(counts.values())} models: {', '.join(f'{count} {verdict}' for verdict, count in counts.most_common())}"
    )
    return int(bool(counts["WRONG"] or counts["program"] or counts["refused"]))


if __name__ == "__main__":
    raise SystemExit(main())
