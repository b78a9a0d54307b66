"""The zoo in training form: `python -m tests.zoo.training [NAME ...]`.

The loss is the mean of squares of all floats that a model returns, in training and in evaluation mode. On 2, 4 and 2 x 2
simulated ranks the loss and all gradients must be those of the single device, and the programs sound.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import tpcompiler
from tests.machines import WIRE
from tests.zoo.case import OUTSIDE, Case
from tests.zoo.each import judge_each
from tests.zoo.index import CASES
from tpcompiler.errors import TpCompilerError

MESHES: Sequence[dict[str, int]] = ({"tp": 2}, {"tp": 4}, {"dp": 2, "tp": 2})


# Models whose training calls `by_hand`: where each layer is columns, then rows, and what is behind the layers is whole.
BY_HAND = """
qwen2 mistral gemma2 opt mixtral gpt2 gptj codegen gpt_neo bloom falcon_rw mpt stablelm xglm biogpt cohere cohere2 glm
granite nemotron smollm3 helium olmo olmo2_cut phi phi3 starcoder2 arcee seed_oss ernie4_5 nanochat vaultgemma ctrl minilm
mpnet nomic_bert esm layoutlm big_bird xlnet funnel modernbert
""".split()  # noqa: SIM905
# The same, and norms over each head: of their weights each rank has the gradients of its heads, summed in one bucket.
NORMS_OF_HEADS = "qwen3 gemma3 exaone4 hunyuan persimmon".split()  # noqa: SIM905


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


def by_hand(case: Case) -> Counter[tuple[str, str]]:
    """What one step calls over `tp`, from what the forward calls.

    Each sum of a layer, after its rows, has its conjugate in the backward, in front of its columns. Outside of layers
    the sum of a cut embedding has none, whose backward adds rows of its own, and neither has the gather of a head, whose
    backward takes a slice; but the head is columns, with a sum in front of it.
    """
    counts = Counter[tuple[str, str]]()
    for (where, kind), count in case.by_hand().items():
        counts["all_reduce", "tp"] += (1 if where == OUTSIDE or kind == "all_gather" else 2) * count
        counts["all_gather", "tp"] += count * (kind == "all_gather")
    counts["all_reduce", "tp"] += case.name in NORMS_OF_HEADS
    return +counts


def judged(name: str) -> tuple[str, bool]:
    """What the meshes give in both modes."""
    case, said, ok = CASES[name], list[str](), True
    for trains in (True, False):
        for mesh in MESHES:
            title = f"{'train' if trains else 'eval'} {'x'.join(map(str, mesh.values()))}"
            try:
                made = converted(case, mesh, trains)
                right = made.verify().ok and made.check().ok
                if name in (*BY_HAND, *NORMS_OF_HEADS) and mesh == {"tp": 2} and not trains:
                    right &= counted(made) == by_hand(case)
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
    os.environ["TPCOMPILER_MACHINE"] = WIRE  # a device gathers a few bytes sooner than it sums fewer
    sys.exit(judge_each(judged, sys.argv[1:], " in training form", "not right"))
