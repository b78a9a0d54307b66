"""What an axis of samples gathers: nothing but what an op needs of all samples together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tpcompiler
from tests.passes.stages import Call
from tests.zoo.index import CASES
from tests.zoo.training import converted

MESH = {"dp": 2, "tp": 2}
PLAN = {"up": "colwise", "down": "rowwise"}


def write_tokens(self: Any, x: torch.Tensor) -> torch.Tensor:
    """A loop over tokens that writes each state, into memory that lies token by token."""
    y = self.down(self.up(x).relu()).transpose(0, 1).contiguous().transpose(0, 1)
    for token in range(1, y.shape[1]):
        y[:, token] = y[:, token] + 0.5 * y[:, token - 1]
    return y.square().mean()


def pool(self: Any, x: torch.Tensor) -> torch.Tensor:
    """A pool to one number, whose joint graph speaks of strides in memory."""
    y = self.down(self.up(x).relu())
    return F.adaptive_avg_pool1d(y.transpose(1, 2), 1).flatten(1).square().mean()


def contrast(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Each sample's embedding is compared with those of all samples."""
    y = self.down(self.up(x).relu()).mean(1)
    return F.logsigmoid(y @ self.other(x).mean(1).t()).mean()


def sort_tokens(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Rows in the order of their numbers, as of experts: of all rows in order each rank goes on with its share."""
    y = self.down(self.up(x).relu()).flatten(0, 1)
    order = self.router(y.detach())[:, 0].argsort()
    weight = torch.linspace(0, 1, y.shape[0])
    return (y[order] * weight[:, None]).square().mean()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("forward", "gathered"),
    [(write_tokens, []), (pool, []), (contrast, [4 * 8 * 4]), (sort_tokens, [4 * 6 * 4, 4 * 6 * 8 * 4])],
)
def test_no_more_is_gathered_than_an_op_needs(forward: Callable[..., Any], gathered: list[int]) -> None:
    """The bytes of each value that is gathered, of 4 samples, 6 tokens and 8 features."""
    torch.manual_seed(0)
    parts = {name: nn.Linear(*sizes) for name, sizes in (("up", (8, 16)), ("down", (16, 8)), ("other", (8, 8)))}
    x = torch.randn(4, 6, 8)
    program = tpcompiler.export_training(Call(forward, **parts, router=nn.Linear(8, 1)), (x,))
    made = tpcompiler.parallelize(program, MESH, PLAN, inputs={"x": {"dp": "S(0)"}})
    sent = [c for c in made.collectives() if c.kind in ("all_gather", "all_to_all") and "dp" in c.axis.split(".")]
    assert sorted(c.payload_bytes for c in sent) == gathered
    report = made.verify((x,))
    assert report.ok, str(report)
    assert made.check().ok


@pytest.mark.slow
def test_sorted_tokens_are_shared_out() -> None:
    """Of Mixtral's experts each rank of an axis of samples multiplies half of the rows: 2 x 12 tokens with 2 each."""
    made = converted(CASES["mixtral"], MESH, trains=False)
    products = [node for node in made.rank_program(0).graph.nodes if "grouped_mm" in str(node.target)]
    assert len(products) == 2 * (2 + 2)  # in each of two layers, and backward
    assert {node.args[0].meta["val"].shape[0] for node in products} == {2 * 12 * 2 // 2}
    tokens = 2 * 12 * 64 * 4
    sent = [
        c for c in made.collectives() if ".layers.0.mlp" in c.module and c.axis == "dp" and c.payload_bytes >= tokens
    ]
    assert [(c.kind, c.payload_bytes // tokens) for c in sent] == [
        ("all_gather", 1),
        ("reduce_scatter", 1),
        ("reduce_scatter", 2),  # backward, of both rows of a token
        ("reduce_scatter", 1),
    ]
    assert made.verify().ok
    assert made.check().ok
