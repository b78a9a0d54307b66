"""`python -m tests.zoo.found [NAME ...]`: for every model, the plan that the search writes gives the program that it found."""

from __future__ import annotations

import dataclasses
import multiprocessing
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

import tpcompiler
from tests.zoo.index import CASES
from tpcompiler import ParallelProgram
from tpcompiler.explain.plan_text import plan_text
from tpcompiler.frontend.plain_weights import with_plain_weights

WORLDS = (2, 4)


def from_file(program: ExportedProgram, mesh: Any, folder: Path, **asked: Any) -> ParallelProgram:
    """Converted with the file that is written for what the search finds."""
    file = folder / "plan.yaml"
    file.write_text(plan_text(with_plain_weights(program), tpcompiler.find_plan(program, mesh, **asked)))
    return tpcompiler.parallelize(program, mesh, file, **asked)


def written(made: ParallelProgram) -> list[Any]:
    """The manifest, but for the plan that was asked for, and of every rank the graph with its claims, and the state."""
    ranks = [made.rank_program(rank) for rank in range(made.world_size)]
    graphs = [
        [(node.name, str(node.target), str(node.args), str(node.meta.get("custom"))) for node in rank.graph.nodes]
        for rank in ranks
    ]
    states = [{name: value.tolist() for name, value in rank.state_dict.items()} for rank in ranks]
    manifest = dataclasses.asdict(made.manifest())
    manifest["asked"].pop("plan", None)
    return [manifest, graphs, states]


def _run(name: str) -> tuple[str, str, bool]:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    program = CASES[name].export(False)
    parts, said = ("manifest", "graphs", "weights"), []
    with tempfile.TemporaryDirectory() as folder:
        for world in WORLDS:
            try:
                both = (
                    written(tpcompiler.parallelize(program, world, "auto")),
                    written(from_file(program, world, Path(folder))),
                )
                said += [f"other {part} on {world}" for part, a, b in zip(parts, *both, strict=True) if a != b]
            except Exception as error:  # the others are wanted all the same
                said.append(f"{type(error).__name__} on {world}: {str(error).splitlines()[0]}")
    return name, "; ".join(said) or "the same", not said


def main(names: Sequence[str]) -> int:
    """1 where a plan gives another program than was found."""
    asked = list(names or CASES)
    bad = 0
    with multiprocessing.get_context("spawn").Pool(2, maxtasksperchild=10) as pool:
        for name, said, ok in pool.imap(_run, asked):
            bad += not ok
            print(f"{name}: {said}", flush=True)
    print(f"{len(asked)} models on {' and '.join(map(str, WORLDS))} ranks, {bad} of them not as found")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
