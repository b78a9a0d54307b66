"""The zoo in training form: `python -m tests.zoo.training [NAME ...]`.

The loss is the mean of squares of all floats that a model returns, in training and in evaluation mode. On 2, 4 and 2 x 2
simulated ranks the loss and all gradients must be those of the single device, and the programs sound.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import tpcompiler
from tests.zoo.case import Case
from tests.zoo.each import judge_each
from tests.zoo.index import CASES
from tpcompiler.errors import TpCompilerError

MESHES: Sequence[dict[str, int]] = ({"tp": 2}, {"tp": 4}, {"dp": 2, "tp": 2})


class WithLoss(nn.Module):
    """A model that returns a loss alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        values = tree_leaves(self.model(**inputs))
        floats = [value for value in values if isinstance(value, torch.Tensor) and value.is_floating_point()]
        losses = [value.float().square().mean() for value in floats]
        return torch.stack(losses).sum()


def converted(case: Case, mesh: dict[str, int], trains: bool = True) -> tpcompiler.ParallelProgram:
    """The case's model with its loss, by the case's plan; over `dp` each input that has samples is cut."""
    torch.manual_seed(0)
    rows, size = case.example
    samples = max(rows, mesh.get("dp", 1))
    inputs = case.inputs(samples, size)
    program = tpcompiler.export_training(WithLoss(case.build()).train(trains), kwargs=inputs)
    plan: dict[str, Any] = {f"model.{name}": style for name, style in case.asked().items()}
    given = {
        name: {"dp": "S(0)"}
        for name, value in inputs.items()
        if "dp" in mesh and value.ndim and value.shape[0] == samples
    }
    return tpcompiler.parallelize(program, mesh, plan, inputs=given)


def counted(made: tpcompiler.ParallelProgram) -> Counter[tuple[str, str]]:
    return Counter((each.kind, each.axis) for each in made.collectives())


def judged(name: str) -> tuple[str, bool]:
    """What the meshes give in both modes."""
    case, said, ok = CASES[name], list[str](), True
    for trains in (True, False):
        for mesh in MESHES:
            title = f"{'train' if trains else 'eval'} {'x'.join(map(str, mesh.values()))}"
            try:
                made = converted(case, mesh, trains)
                right = made.verify().ok and made.check().ok
                fallbacks = sum(each.why == "fallback" for each in made.collectives())
                kinds = Counter(re.sub("[a-z_]*_(.).*", r"\1", each.kind) for each in made.collectives())
                counts = "+".join(f"{count}{kind}" for kind, count in sorted(kinds.items()))
                said.append(
                    f"{title}: {'' if right else 'WRONG '}{counts or '0'}{f' ({fallbacks}?)' if fallbacks else ''}"
                )
            except TpCompilerError as error:
                right = False
                said.append(f"{title}: {type(error).__name__}: {error.message.splitlines()[0]}")
            ok &= right
    return "; ".join(said), ok


if __name__ == "__main__":
    sys.exit(judge_each(judged, sys.argv[1:], " in training form", "not right"))
