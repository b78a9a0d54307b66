"""The predicted step of small programs on one rank, summed by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tpcompiler.api.request import Request
from tpcompiler.cost.machine import Machine
from tpcompiler.cost.timeline import duration
from tpcompiler.parallel.pipeline import find_placements
from tpcompiler.solver.estimate import StepTime, measure_step_time, sent_by

BF16 = torch.bfloat16
BYTE, FLOP = 1e-12, 1e-13  # seconds of one
PRODUCT, ATTENTION, OTHER = 3e-6, 13e-6, 2e-6
RATES: dict[str, Any] = {"product": PRODUCT, "attention": ATTENTION, "other": OTHER}
HERE = Machine(
    1 / FLOP,
    1 / BYTE,
    8e10,
    **RATES,
    dtypes={"int8": {"flops": 2 / FLOP}, "int8_weights": {"product": 5e-6, "memory_bandwidth": 0.5 / BYTE}},
)


def step(model: nn.Module, *inputs: torch.Tensor, keep_repeats: bool = False) -> StepTime:
    """One call on one rank."""
    exported = torch.export.export(model, inputs)
    request = Request(exported, 1, {}, keep_repeats=keep_repeats, machine=HERE)
    found = find_placements([*request.conversions().values()])
    assert not list(sent_by(found))
    return measure_step_time(found, HERE)


class Weights(nn.Module):
    """A product with weights of one byte: widened for it, or of two such operands."""

    def __init__(self, both: bool) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(512, 256, dtype=torch.int8))
        self.both = both

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch._int_mm(x, self.weight.t()) if self.both else F.linear(x, self.weight.to(x.dtype))


def test_parts_of_a_step() -> None:
    """Half of the step of a decoder that repeats its heads is copies; without, they are the written tokens."""

    class Decode(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q = nn.Linear(256, 8 * 64, bias=False)
            self.register_buffer("keys", torch.randn(1, 2, 512, 64))
            self.register_buffer("values", torch.randn(1, 2, 512, 64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = self.q(x).view(1, 1, 8, 64).transpose(1, 2)
            k, v = (
                each[:, :, None].expand(1, 2, 4, 512, 64).reshape(1, 8, 512, 64) for each in (self.keys, self.values)
            )
            return F.scaled_dot_product_attention(q, k, v)

    cache, many, weights = (count * 4 * BYTE for count in (2 * 2 * 512 * 64, 2 * 8 * 512 * 64, 256 * 8 * 64))
    repeats, once = (step(Decode(), torch.randn(1, 1, 256), keep_repeats=keep) for keep in (True, False))
    assert repeats.copies == pytest.approx(cache + many)
    assert repeats.attention == pytest.approx(many, rel=0.02)
    assert once.copies == 0
    assert once.attention == pytest.approx(cache, rel=0.02)
    for each in (repeats, once):
        assert each.weights == pytest.approx(weights, rel=0.02)
        assert sum(each.parts.values()) == pytest.approx(each.total)


def test_weights_of_one_byte() -> None:
    """Read as bytes at their own rate; many rows multiply at the rate of what they are widened to."""
    few = step(Weights(both=False), torch.zeros(4, 256, dtype=BF16))
    assert few.kernels == pytest.approx(5e-6)
    assert few.work == pytest.approx((512 * 256 + 2 * 4 * 256 + 2 * 4 * 512) * 2 * BYTE)
    many = step(Weights(both=False), torch.zeros(1 << 16, 256, dtype=BF16))
    assert many.work == pytest.approx(2 * (1 << 16) * 512 * 256 * FLOP)


def test_two_operands_of_one_byte() -> None:
    """Half the time of FLOPs."""
    both = step(Weights(both=True), torch.zeros(8192, 256, dtype=torch.int8))
    assert both.kernels == pytest.approx(PRODUCT)
    assert both.work == pytest.approx(8192 * 512 * 256 * FLOP)


class Cached(nn.Module):
    """A new token of each of 4 sequences attends to 1,000 before; eight heads share two of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(4, 2, 1001, 64, dtype=BF16))

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        self.keys.index_copy_(2, at, k)
        self.values.index_copy_(2, at, v)
        return F.scaled_dot_product_attention(q, self.keys, self.values, enable_gqa=True)


def test_attention_with_a_cache() -> None:
    """Its floor, and keys and values once; a cache moves what is written to it, read and written, with its index."""
    q, k, v = (torch.zeros(4, heads, 1, 64, dtype=BF16) for heads in (8, 2, 2))
    took = step(Cached(), q, k, v, torch.tensor([1000]))
    assert took.kernels == pytest.approx(ATTENTION + 2 * OTHER)
    cache, new = 2 * 4 * 2 * 1001 * 64, 2 * 4 * 2 * 64
    written = 2 * (2 * new + 2 * 8)
    assert took.work == pytest.approx((2 * cache + 2 * (2 * 4 * 8 * 64) + written) * BYTE, rel=1e-3)


class Head(nn.Module):
    """Logits of the last token of many."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 1000, bias=False, dtype=BF16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x[:, -1:])


def test_a_head_on_the_last_token() -> None:
    """A row of each sequence, not of each token; the slice is a view."""
    took = step(Head(), torch.zeros(4, 2048, 64, dtype=BF16))
    assert took.kernels == pytest.approx(PRODUCT)
    assert took.work == pytest.approx(2 * (4 * 64 + 64 * 1000 + 4 * 1000) * BYTE)


class Experts(nn.Module):
    """Two of eight experts for each token, one behind the other."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("up", torch.zeros(8, 64, 128, dtype=BF16))

    def forward(self, x: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        order, experts = scores.topk(2).indices.flatten().sort()[::-1]
        ends = F.one_hot(experts, 8).sum(0).cumsum(0).to(torch.int32)
        return torch._grouped_mm(x[order // 2], self.up, ends)


@pytest.mark.parametrize("tokens", [1, 16])
def test_experts_that_are_chosen(tokens: int) -> None:
    """Of one token two, of 16 all but 1 % of eight, expected; what chooses them is a few bytes."""
    took = step(Experts(), torch.zeros(tokens, 64, dtype=BF16), torch.zeros(tokens, 8))
    weights = 2 * 8 * (1 - (6 / 8) ** tokens) * 64 * 128
    assert weights == pytest.approx({1: 2 * 2, 16: 2 * 8}[tokens] * 64 * 128, rel=0.011)
    assert weights * BYTE < took.work < (weights + tokens * 4000) * BYTE


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0 ns"), (999.6e-6, "1 ms"), (0.9996, "1 s"), (1.25e-7, "125 ns"), (75.0, "75 s")]
)
def test_a_duration_has_three_digits(seconds: float, text: str) -> None:
    assert duration(seconds) == text
