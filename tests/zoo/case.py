"""What a case of the zoo states: a small model, its inputs, its plan, and what is known of the result by hand."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.export import Dim, ExportedProgram

OUTSIDE = "outside"  # of all layers
Plan = Mapping[str, object] | Callable[[torch.nn.Module], Mapping[str, object]]
BATCH, SEQUENCE, TARGET = Dim("batch"), Dim("sequence", max=512), Dim("target", max=512)


@dataclass(frozen=True)
class Layers:
    """Repeated layers: where they lie (`*` is the number), how many there are, and the collectives of each."""

    path: str
    count: int
    each: Mapping[str, int]


@dataclass(frozen=True, eq=False)  # a case is itself, so that results can be remembered by it
class Case:
    """A model with its plan and what is known of it by hand.

    Attributes:
        inputs: (batch, size) -> keyword arguments; size is the case's second dim: a sequence, an image, a bag of ids.
        plan: or what reads it off the built model (`hugging_face`).
        dims: `dynamic_shapes` of the dynamic export; None where there is none, with the reason in `static_because`.
        example, others: the (batch, size) of the export, and those that the dynamic program is run at besides.
        outside: the collectives outside of `layers`.
        cut: the least share of all parameters' bytes that must be cut.
        flops: the least share of the FLOPs of matrix products and convolutions that must be cut.
        inert: parameters that no output depends on, by the end of their name, with the reason.
        then: (batch, size) -> arguments of further calls, each on the buffers that those before have written.
        tested: the risk that the test suite has it for; without one only `make zoo` has it.
        strict: how it is exported; both kinds keep other things of a model.
        pending: a known shortfall: what the case states is what is so today, and this is what it should be, and why not.
    """

    name: str
    build: Callable[[], torch.nn.Module]
    inputs: Callable[[int, int], dict[str, torch.Tensor]]
    plan: Plan
    layers: tuple[Layers, ...]
    outside: Mapping[str, int]
    cut: float
    dims: Mapping[str, Any] | None = None
    static_because: str = ""
    example: tuple[int, int] = (2, 12)
    others: tuple[tuple[int, int], ...] = ((3, 7), (1, 5))
    flops: float = 0.0
    inert: Mapping[str, str] = field(default_factory=dict)
    then: Callable[[int, int], Sequence[dict[str, torch.Tensor]]] | None = None
    tested: str = ""
    pending: str = ""
    strict: bool = False

    def asked(self) -> Mapping[str, object]:
        """The plan itself."""
        return self.plan(self.build()) if callable(self.plan) else self.plan

    def export(self, dynamic: bool) -> ExportedProgram:
        shapes = self.dims if dynamic else None
        return torch.export.export(
            self.build(), (), self.inputs(*self.example), dynamic_shapes=shapes, strict=self.strict
        )

    def by_hand(self) -> Counter[tuple[str, str]]:
        """(layer or OUTSIDE, kind) -> count."""
        counts = Counter({(OUTSIDE, kind): count for kind, count in self.outside.items()})
        for layers in self.layers:
            for number in range(layers.count):
                counts.update({(layers.path.replace("*", str(number)), kind): n for kind, n in layers.each.items()})
        return counts


def hugging_face(model: torch.nn.Module) -> dict[str, object]:
    """The `tp_plan` that the model comes with, less the entries for layers that this one does not have.

    Raises:
        ValueError: it comes with none, or only with one for its head.
    """
    plan: dict[str, object] = dict(model.tp_plan)
    names = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
    patterns = {entry: re.compile(re.escape(entry).replace(r"\*", r"\d+")) for entry in plan}
    present = {entry: plan[entry] for entry, made in patterns.items() if any(map(made.fullmatch, names))}
    if len(present) < 2:
        raise ValueError(f"{type(model).__name__} has no tp_plan")
    return present


def randomise(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Weights about 1/sqrt(fan_in), norm weights about 1, biases about 0.3: a wrong shard or a doubled bias shows."""
    generator = torch.Generator().manual_seed(seed)
    kinds = {f"{name}.weight": type(module).__name__.lower() for name, module in model.named_modules()}
    with torch.no_grad():
        for name, value in model.named_parameters():
            noise = torch.randn(value.shape, generator=generator)
            if "norm" in kinds.get(name, ""):
                value.copy_(1 + 0.2 * noise)
            elif value.ndim > 1:
                fan_in = value[0].numel() if "conv" in kinds.get(name, "") else value.shape[-1]
                value.copy_(noise / fan_in**0.5)
            else:
                value.copy_(0.3 * noise)
        for name, value in model.named_buffers():
            noise = torch.rand(value.shape, generator=generator)
            if name.endswith("running_var"):
                value.copy_(1 + 0.3 * noise)
            elif name.endswith(("running_mean", "_bias")):
                value.copy_(0.6 * noise - 0.3)
    return model.eval()


def token_ids(vocabulary: int, name: str = "input_ids") -> Callable[[int, int], dict[str, torch.Tensor]]:
    def make(batch: int, sequence: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(batch * 1000 + sequence)
        return {name: torch.randint(0, vocabulary, (batch, sequence), generator=generator)}

    return make


def source_and_target(vocabulary: int) -> Callable[[int, int], dict[str, torch.Tensor]]:
    """Ids for an encoder, and half as many and one more for its decoder."""

    def make(batch: int, sequence: int) -> dict[str, torch.Tensor]:
        target = token_ids(vocabulary, "decoder_input_ids")(batch, sequence // 2 + 1)
        return {**token_ids(vocabulary)(batch, sequence), **target}

    return make


def noise(name: str, *shape: int) -> dict[str, torch.Tensor]:
    return {name: torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))}
