"""`python -m tests.zoo.elastic [NAME ...]`: every model cut for 2 ranks, for 3 from that, and put together again."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

import tpcompiler
from tests.zoo.case import Case
from tests.zoo.each import judge_each
from tests.zoo.index import CASES
from tpcompiler.errors import ShardingError
from tpcompiler.runtime.artifact import read_manifest
from tpcompiler.runtime.model_file import read_model

WORLDS = (3, 4)  # the first that the model's plan suits; cuts by 3 are uneven


def bits(program: ExportedProgram) -> dict[str, bytes]:
    """The very bits of all that a program holds."""
    held: Mapping[str, Any] = {**program.constants, **program.state_dict}
    return {
        name: bytes(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        for name, value in held.items()
        if isinstance(value, torch.Tensor)
    }


def there_and_back(case: Case, directory: Path, layout: Any) -> tuple[str, list[str]]:
    """Through which degrees a case went, and what came back changed: names of weights, or the program's text."""
    original = case.export(False)
    torch.export.save(original, directory / "whole.pt2")
    original = torch.export.load(directory / "whole.pt2")  # a file keeps what differs from process to process no better
    tpcompiler.parallelize(original, 2, case.asked()).save(directory / "two", layout=layout)
    for world in WORLDS:
        try:
            tpcompiler.open(directory / "two").reshard(world, directory / "other")
            break
        except ShardingError:
            if world == WORLDS[-1]:
                raise
    tpcompiler.open(directory / "other").merge(directory / "model.pt2")
    back = read_model(directory / "model.pt2")
    old, new = bits(original), bits(back)
    wrong = [name for name in old.keys() | new.keys() if old.get(name) != new.get(name)]
    if str(original.graph) != str(back.graph) or str(original.graph_signature) != str(back.graph_signature):
        wrong.append("the program")
    uneven = " uneven" * (len(read_manifest(directory / "other").programs) > 1)
    return f"2 -> {world}{uneven} -> 1, {len(new)} tensors", sorted(wrong)


def _judge(name: str) -> tuple[str, bool]:
    layout = ("ranks", "shared")[list(CASES).index(name) % 2]
    with tempfile.TemporaryDirectory() as folder:
        said, wrong = there_and_back(CASES[name], Path(folder), layout)
    return said + (f": not the same: {', '.join(wrong[:5])}" if wrong else ": the same bits"), not wrong


def main(names: Sequence[str]) -> int:
    """1 where a model came back changed, or not at all."""
    return judge_each(_judge, names, "", "not bit for bit what went in")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
