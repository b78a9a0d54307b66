"""One call of an op, with the text of its rule; and random tensors for its operands.

Every sample draws from the same seed, so that a new one changes the numbers of no other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tpcompiler._torch import OpOverload, tree_map
from tpcompiler.judge.rules import run_on_shards

SEED = 0
_random = torch.Generator().manual_seed(SEED)


@dataclass(frozen=True)
class Sample:
    target: OpOverload
    text: str | None  # of its rule; None: no rule for this call
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __str__(self) -> str:
        given = (self.args, self.kwargs)
        args, kwargs = tree_map(lambda a: list(a.shape) if isinstance(a, torch.Tensor) else a, given)
        return f"{self.target}{args}{kwargs or ''}".replace(" ", "")


def call(target: OpOverload, *args: Any, text: str | None, **kwargs: Any) -> Sample:
    _random.manual_seed(SEED)  # for the operands of the next sample
    return Sample(target, text, args, kwargs)


def t(*shape: int) -> torch.Tensor:
    """Normal values in float64, so that a wrong answer is far from rounding."""
    return torch.randn(shape, dtype=torch.float64, generator=_random)


def ids(*shape: int, below: int) -> torch.Tensor:
    return torch.randint(below, shape, generator=_random)


def distinct(*shape: int) -> torch.Tensor:
    return torch.randperm(torch.Size(shape).numel(), generator=_random).view(shape)


def flags(*shape: int) -> torch.Tensor:
    return t(*shape) > 0


def node_of(sample: Sample) -> fx.Node:
    return run_on_shards.node_of(sample.target, sample.args, sample.kwargs)
