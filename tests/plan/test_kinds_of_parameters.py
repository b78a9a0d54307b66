"""Styles that name a parameter of any kind: a vector, a table, stacked experts, a scalar; and `packed` ones of biases."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import ExportedProgram, export

import tpcompiler
from tests.machines import CALLS
from tests.passes.stages import Call
from tests.zoo.case import randomise
from tpcompiler.errors import PlanError

MACHINE = CALLS
X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
BASE = {"in_proj": "colwise", "out": "rowwise"}


def forward(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of four heads with sinks, a table of distances and a temperature; its parts scaled and moved."""
    q, k, v = (x @ self.in_proj.weight.t() + self.in_proj.bias).chunk(3, -1)
    q, k, v = (part.view(2, 5, 4, 2).transpose(1, 2) for part in (q, k, v))
    scores = q @ k.transpose(-1, -2) * self.temperature + self.table
    sinks = self.sinks.reshape(1, -1, 1, 1).expand(2, -1, 5, -1)
    weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    made = (weights @ v).transpose(1, 2).reshape(2, 5, 8) * self.gate + self.shift
    out = self.out(made) * self.scalar * self.one
    return torch.einsum("bsd,edf->ebsf", out, self.experts).sum(0), out @ self.probe


@cache
def exported() -> ExportedProgram:
    parts = {"sinks": (4,), "table": (4, 5, 5), "temperature": (4, 1, 1), "gate": (8,), "shift": (8,), "probe": (8,)}
    packed = Call(lambda self: None, weight=(24, 8), bias=(24,))
    more = {"in_proj": packed, "out": nn.Linear(8, 8), "scalar": (), "one": (1,), "experts": (4, 8, 8), "idle": (8,)}
    return export(randomise(Call(forward, **parts, **more)), (X,))


def converted(plan: Mapping[str, object]) -> tpcompiler.ParallelProgram:
    return tpcompiler.parallelize(exported(), 2, {**BASE, **plan})


def placed(program: tpcompiler.ParallelProgram) -> dict[str, object]:
    return {row.name: row.sharding for row in program.manifest().tensors}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "style", "sharding"),
    [
        ("sinks", "colwise", "S(0)"),
        ("sinks", "local_rowwise", "S(0)"),  # as older configs of gpt-oss say it
        ("temperature", "colwise", "S(0)"),  # a vector among dims of one element
        ("gate", "colwise", "S(0)"),
        ("gate", "rowwise", "S(0)"),
        ("shift", "colwise", "S(0)"),
        ("probe", "rowwise", "S(0)"),
        ("probe", "colwise", "S(0)"),
        ("in_proj.bias", "packed_colwise", "S(0, block 8)"),
        ("in_proj.bias", "packed_colwise:3", "S(0, block 8)"),
        ("in_proj.bias", "colwise", "S(0, block 8)"),
        ("experts", "rowwise", "S(1)"),
    ],
)
def test_what_is_cut(name: str, style: str, sharding: str) -> None:
    program = converted({name: style})
    assert placed(program)[name] == sharding
    assert program.verify((X,)).ok
    assert not [c for c in program.collectives() if c.why == "fallback"]


@pytest.mark.slow
@pytest.mark.parametrize("style", ["rowwise", "packed_rowwise"])
@pytest.mark.parametrize("name", ["out.bias", "in_proj.bias", "shift"])
def test_a_row_wise_style_leaves_a_bias_to_its_layer(name: str, style: str) -> None:
    """As of a layer, whose bias is added once: the same program as without the entry."""
    program = converted({name: style})
    assert placed(program) == placed(converted({}))
    assert program.verify((X,)).ok


def test_every_parameter_matters() -> None:
    """Negative control: ranks with wrong shares of any of them would give other numbers."""
    whole = exported().module()
    expected = whole(X)
    for name, value in whole.named_parameters():
        if name != "idle":
            old = value.detach().clone()
            value.data = torch.cat([old.flatten()[1:], old.flatten()[:1] + 1]).view(old.shape)
            assert not all(map(torch.allclose, whole(X), expected)), name
            value.data = old


@pytest.mark.parametrize(
    ("name", "style", "message", "help"),
    [
        ("scalar", "colwise", "style 'colwise' does not fit 'scalar': it has one element", 'write "scalar": R'),
        ("one", "rowwise", "style 'rowwise' does not fit 'one': it has one element", 'write "one": R'),
        (
            "table",
            "rowwise",
            "style 'rowwise' does not fit 'table': it has no input features",
            'give the dim to cut, as in "table": "S(0)" or "table": "S(1)" or "table": "S(2)"',
        ),
        (
            "experts",
            "colwise",
            "style 'colwise' is ambiguous for 'experts': its uses cut dims [0, 2]",
            'give an explicit placement, e.g. "experts": "S(0)"',
        ),
        (
            "sinks",
            "packed_colwise",
            "'sinks' is to be cut in parts, but its uses show none",
            "use the style without 'packed_', or give the sizes of the parts, as in 'packed_colwise:64,16,16'",
        ),
        ("idle", "colwise", "style 'colwise' does not fit 'idle': no op of the program uses it", "remove the entry"),
    ],
)
def test_what_no_style_cuts(name: str, style: str, message: str, help: str) -> None:
    with pytest.raises(PlanError) as error:
        converted({name: style})
    assert (error.value.message, error.value.help) == (message, help)


def test_a_packed_style_of_a_layer_that_has_more_than_what_is_packed() -> None:
    """The biases that torch's attention puts behind keys and values have no parts, and follow the heads."""
    attention = Call(lambda self, x: self.inner(x, x, x)[0], inner=nn.MultiheadAttention(8, 4, add_bias_kv=True))
    plan = {"inner": "packed_colwise", "inner.out_proj": "rowwise"}
    program = tpcompiler.parallelize(export(randomise(attention), (X,)), 2, plan)
    assert program.verify((X,)).ok
    assert placed(program)["inner.in_proj_weight"] == "S(0, block 8)"
    assert placed(program)["inner.out_proj.weight"] == "S(1)"  # which torch's attention uses itself


@pytest.mark.slow
def test_a_layer_whose_parent_uses_its_weight() -> None:
    """Torch's attention reads the weight of its last layer itself, and does not call the layer."""
    attention = Call(lambda self, x: self.inner(x, x, x, need_weights=False)[0], inner=nn.MultiheadAttention(8, 4))
    plan = {"inner": "packed_colwise", "inner.out_proj": "rowwise"}
    program = tpcompiler.parallelize(export(randomise(attention), (X,)), 2, plan)
    assert program.verify((X,)).ok
    assert placed(program)["inner.out_proj.weight"] == "S(1)"
    assert [each.kind for each in program.collectives()] == ["all_reduce"]
