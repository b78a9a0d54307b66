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
from tests.machines import CALLS, WIRE
from tests.zoo.case import OUTSIDE, Case
from tests.zoo.each import judge_each
from tests.zoo.index import CASES
from tpcompiler.errors import TpCompilerError

MESHES: Sequence[dict[str, int]] = ({"tp": 2}, {"tp": 4}, {"dp": 2, "tp": 2})


# Models whose training calls `by_hand`: where each layer is columns, then rows, and what is behind the layers is whole.
BY_HAND = """
llama llama_2_kv gemma2 opt mixtral gpt2 gptj codegen bloom cohere glm olmo2_cut phi3
minilm layoutlm xlnet funnel modernbert wav2vec2 efficientnet
""".split()  # noqa: SIM905
# The same, and further sums in the backward: their number in one call, and why.
MORE: dict[str, dict[str, int]] = {
    # Norms over each head: of their weights each rank has the gradients of its heads, summed in one bucket.
    "norms of heads": {"qwen3": 1, "gemma3n": 1},
    # Attention and MLP have a norm each and one residual: sums wait behind the norms, whose weights' are in one bucket.
    "norms side by side": {"gpt_neox": 1},
    # The keys and values of all decoder layers add to the gradient of the encoder's output, which is summed once.
    "cross-attention": {"bart": 1, "whisper": 1, "t5": 1},
    # Each rank has a part of each expert, or its experts: in each layer of experts, the gradient of the router's weights.
    "routers": {
        **{"mixtral_cut": 2, "minimax": 2, "llama4": 1},  # the first layer of llama4 has no experts
        **{"qwen3_moe": 2 + 1, "qwen2_moe": 2 + 2},  # norms of heads; the gate of the shared expert
    },
    # Queries, and keys with values, are columns behind a norm of a narrow value each, and one part of the keys has none:
    # three sums in a layer for one. The second layer has a router.
    "latents": {"deepseek_v3": 2 * 2 + 1},
    # Two slopes in the activation of each layer; and norms of heads.
    "slopes": {"apertus": 2 * 2 + 1},
}
FURTHER = {name: count for models in MORE.values() for name, count in models.items()}

# Models that gather more for their gradients than for their outputs, and why.
WITH_FALLBACKS = {
    "falcon_7b": "one head of keys and values, columns of which each rank has some; the plan cuts them with the queries",
}


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


def converted(
    case: Case, mesh: dict[str, int], trains: bool = True, gradients: bool = True, machine: str | None = None
) -> tpcompiler.ParallelProgram:
    """The case's model with its loss, by the case's plan; over `dp` each input that has samples is cut."""
    torch.manual_seed(0)
    rows, size = case.example
    samples = max(rows, mesh.get("dp", 1))
    inputs = case.inputs(samples, size)
    model = WithLoss(case.build()).train(trains)
    program = tpcompiler.export_training(model, kwargs=inputs) if gradients else torch.export.export(model, (), inputs)
    plan: dict[str, Any] = {f"model.{name}": style for name, style in case.asked().items()}
    given = {
        name: {"dp": "S(0)"}
        for name, value in inputs.items()
        if "dp" in mesh and value.ndim and value.shape[0] == samples
    }
    return tpcompiler.parallelize(program, mesh, plan, inputs=given, machine=machine)


def counted(made: tpcompiler.ParallelProgram) -> Counter[tuple[str, str]]:
    """How often each kind is called over each axis; a scatter and the gather after it are one sum."""
    counts = Counter((each.kind, each.axis) for each in made.collectives())
    for axis in {axis for _, axis in counts}:
        pairs = min(counts["reduce_scatter", axis], counts["all_gather", axis])
        counts += Counter({("all_reduce", axis): pairs})
        counts -= Counter({("reduce_scatter", axis): pairs, ("all_gather", axis): pairs})
    return counts


def further_fallbacks(case: Case, mesh: dict[str, int]) -> Counter[str]:
    """By module, the bytes that only the program with gradients gathers as fallbacks, in evaluation mode.

    On three machines: where only bytes count, a gather and a sum of as many bytes are equal; where calls have a latency,
    a few bytes are sooner gathered than fewer summed.
    """
    more = Counter[str]()
    for machine in (WIRE, CALLS, "h100"):
        whole, forward = (_fallbacks(converted(case, mesh, False, each, machine)) for each in (True, False))
        if not (more := whole - forward):
            break
    return more


def _fallbacks(made: tpcompiler.ParallelProgram) -> Counter[str]:
    """The bytes of gathers by module. One whose gradient is scattered is half of a sum: keys that all queries share are
    columns, and their gradients would be summed if each rank had computed all keys.
    """
    found = Counter[str]()
    scattered = Counter((e.module, e.axis, e.wire_bytes) for e in made.collectives() if e.kind == "reduce_scatter")
    for each in made.collectives():
        if each.why == "fallback" and each.kind == "all_gather" and scattered[each.module, each.axis, each.wire_bytes]:
            scattered[each.module, each.axis, each.wire_bytes] -= 1
        elif each.why == "fallback":
            found[each.module] += each.wire_bytes
    return found


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
    counts["all_reduce", "tp"] += FURTHER.get(case.name, 0)
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
                if name in (*BY_HAND, *FURTHER) and mesh == {"tp": 2} and not trains:
                    right &= counted(made) == by_hand(case)
                if mesh == {"tp": 2} and not trains:
                    right &= bool(further_fallbacks(case, mesh)) == (name in WITH_FALLBACKS)
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
