"""Placements without a plan beside the plans that people wrote, on the tests' models; and how long the search takes.

    python -m tools.bench_auto [--mesh dp=2,tp=2] [NAME ...]
    python -m tools.bench_auto --layers 32 80 --mesh tp=8

For each model: wire bytes of a call and bytes of weights on the rank that holds most, of both; what `plan="auto"` gives
is compared with the single device. With --layers the search is timed on a Llama of 8B shape, beside its torch.export.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections import Counter
from collections.abc import Sequence

import torch

import tpcompiler
from tests.zoo.index import CASES
from tools.bench_convert import export, times
from tpcompiler.cli.options import read_mesh
from tpcompiler.cost.machine_file import read_machine
from tpcompiler.cost.objective import Objective
from tpcompiler.errors import TpCompilerError
from tpcompiler.ir.collector import collector_rests
from tpcompiler.ir.mesh import Mesh
from tpcompiler.passes.apply_plan import apply_plan
from tpcompiler.passes.canonicalize import canonicalize
from tpcompiler.passes.divide_sizes import divide_sizes
from tpcompiler.passes.join_branches import join_branches
from tpcompiler.plan import Plan
from tpcompiler.solver.search import search


def spent(program: tpcompiler.ParallelProgram) -> tuple[int, int]:
    return sum(c.wire_bytes for c in program.collectives()), max(program.parameter_bytes()[1])


def compare(name: str, mesh: Mesh) -> str:
    """A line about one model; the verdict is its last word."""
    case = CASES[name]
    program = case.export(False)
    try:
        auto = tpcompiler.parallelize(program, mesh, "auto")
        if not auto.verify((), case.inputs(*case.example)).ok:
            return f"{name}: the numbers are WRONG"
        ours, theirs = spent(auto), spent(tpcompiler.parallelize(program, mesh, case.asked()))
    except TpCompilerError as error:
        return f"{name}: {type(error).__name__}: {str(error).splitlines()[0]}: refused"
    both = [a <= b for a, b in zip(ours, theirs, strict=True)]
    verdict = {(True, True): "no-worse", (False, False): "worse"}.get((both[0], both[1]), "a-trade")
    return (
        f"{name}: wire {ours[0]:,} of {theirs[0]:,}, weights {ours[1]:,} of {theirs[1]:,}: "
        f"{verdict if ours != theirs else 'the-same'}"
    )


@collector_rests()
def time_search(layers: int, mesh: Mesh) -> str:
    program = canonicalize(export(layers, dynamic=False))
    planned = divide_sizes(join_branches(apply_plan(program, Plan(), mesh)))
    started = time.perf_counter()
    found = search([planned], Objective.of(read_machine()), free=True)
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
    options.add_argument("--layers", type=int, nargs="*", help="time the search instead")
    asked = options.parse_args(words)
    mesh = read_mesh(None, asked.mesh)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for layers in asked.layers or ():
        print(time_search(layers, mesh), flush=True)
    if asked.layers:
        return 0
    counts: Counter[str] = Counter()
    for name in asked.names or CASES:
        line = compare(name, mesh)
        counts[line.rpartition(" ")[2]] += 1
        print(line, flush=True)
    print(
        f"{sum(counts.values())} models: {', '.join(f'{count} {verdict}' for verdict, count in counts.most_common())}"
    )
    return int(bool(counts["WRONG"] or counts["refused"]))


if __name__ == "__main__":
    raise SystemExit(main())
