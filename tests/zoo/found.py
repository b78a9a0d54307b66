"""`python -m tests.zoo.found [NAME ...]`: for every model, the plan that the search writes gives the program that it found."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.export import ExportedProgram

import tpcompiler
from tests.zoo.each import judge_each
from tests.zoo.index import CASES
from tpcompiler import ParallelProgram
from tpcompiler.cli.describe import plan_text
from tpcompiler.frontend.plain_weights import with_plain_weights
from tpcompiler.runtime.records import plain_data

WORLDS = (2, 4)


def from_file(program: ExportedProgram, mesh: Any, folder: Path, **asked: Any) -> ParallelProgram:
    """Converted with the file that is written for what the search finds."""
    file = folder / "plan.yaml"
    file.write_text(plan_text(with_plain_weights(program), tpcompiler.find_plan(program, mesh, **asked)))
    return tpcompiler.parallelize(program, mesh, file, **asked)


def written(made: ParallelProgram) -> list[Any]:
    """The manifest, and of every rank the graph with its claims, and the state."""
    ranks = [made.rank_program(rank) for rank in range(made.world_size)]
    graphs = [
        [(node.name, str(node.target), str(node.args), str(node.meta.get("custom"))) for node in rank.graph.nodes]
        for rank in ranks
    ]
    states = [{name: value.tolist() for name, value in rank.state_dict.items()} for rank in ranks]
    return [plain_data(made.manifest()), graphs, states]


def _judge(name: str) -> tuple[str, bool]:
    program, said = CASES[name].export(False), list[str]()
    with tempfile.TemporaryDirectory() as folder:
        for world in WORLDS:
            both = (
                written(tpcompiler.parallelize(program, world, "auto")),
                written(from_file(program, world, Path(folder))),
            )
            parts = zip(("manifest", "graphs", "weights"), *both, strict=True)
            said += [f"other {part} on {world}" for part, a, b in parts if a != b]
    return "; ".join(said) or "the same", not said


def main(names: Sequence[str]) -> int:
    """1 where a plan gives another program than was found."""
    return judge_each(_judge, names, f" on {' and '.join(map(str, WORLDS))} ranks", "not as found")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
