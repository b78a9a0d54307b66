"""The work of a product is what torch counts."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import tpcompiler.rules  # noqa: F401  (registers the rules)
from tpcompiler.cost.objective import local_work
from tpcompiler.ir import edit
from tpcompiler.ir.dim_sharding import DimSharding
from tpcompiler.ir.mesh import Mesh
from tpcompiler.passes.canonicalize import canonicalize
from tpcompiler.rules.infer import Option
from tpcompiler.rules.registry import rule_of

IMAGE = (2, 8, 16, 16)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Linear(8, 16), (4, 8)),
        (nn.Conv2d(8, 16, 3, stride=2, padding=1), IMAGE),
        (nn.Conv2d(8, 16, 4, stride=4), IMAGE),
        (nn.Conv2d(8, 16, 3, groups=4, padding=1), IMAGE),
        (nn.ConvTranspose2d(8, 16, 2, stride=2), IMAGE),
    ],
    ids=["linear", "conv", "patches", "groups", "transposed"],
)
def test_flops(module: nn.Module, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    with FlopCounterMode(display=False) as counter:
        module(x)
    (call,) = edit.calls(canonicalize(torch.export.export(module, (x,))).graph)
    rule, mesh = rule_of(call), Mesh.of(2)
    assert rule is not None
    assert local_work(call, rule, Option(), mesh).flops == counter.get_total_flops()
    (batch, *_) = rule.pattern.outputs[0][0]
    assert local_work(call, rule, Option({batch: DimSharding.by("tp")}), mesh).flops == counter.get_total_flops() / 2
