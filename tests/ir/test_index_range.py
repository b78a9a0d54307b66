"""Inputs that are indices: the values that the single-device program takes, and no narrower."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.export import export

import tpcompiler

IDS = torch.tensor([0, 1])
Use = Callable[["Tables", torch.Tensor], torch.Tensor]


class Tables(nn.Module):
    def __init__(self, use: Use) -> None:
        super().__init__()
        self.table, self.other = nn.Embedding(7, 4), nn.Embedding(5, 4)
        self.register_buffer("cache", torch.zeros(6, 4))
        self.use = use

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.use(self, ids)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("use", "values"),
    [
        (lambda m, ids: m.table(ids), [0, 6]),
        (lambda m, ids: m.table(ids.unsqueeze(0).to(torch.int32)) + m.other(ids), [0, 4]),
        (lambda m, ids: m.cache.index_copy(0, ids, torch.ones(2, 4)), [0, 5]),
        (lambda m, ids: m.cache.index_select(0, ids), [0, 5]),
        (lambda m, ids: m.cache[:, 0].gather(0, ids), [0, 5]),
        (lambda m, ids: m.cache[ids], [-6, 5]),
        (lambda m, ids: m.cache[ids] + m.table(ids), [0, 5]),
        (lambda m, ids: m.table(ids[:1]), None),  # the others may be anything
        (lambda m, ids: m.table(ids.clamp(0, 6)), None),
        (lambda m, ids: m.table(torch.where(ids < 0, 0, ids)), None),
        (lambda m, ids: ids * 2.0, None),
        (lambda m, ids: m.table(ids.to(torch.uint8).long()), None),  # which wraps
        (lambda m, ids: m.cache.sum().gather(0, ids[0]), None),
    ],
)
def test_what_an_input_may_be(use: Use, values: list[int] | None) -> None:
    module = Tables(use)
    program = tpcompiler.parallelize(export(module, (IDS,)), 2, {})
    (row,) = program.manifest().inputs
    assert row.values == values
    if values is None:
        return
    for end, beyond in ((values[0], values[0] - 1), (values[1], values[1] + 1)):
        module(torch.tensor([end, end]))
        with pytest.raises((IndexError, RuntimeError)):
            module(torch.tensor([end, beyond]))
