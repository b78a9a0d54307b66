"""The one printer, and what it reads off programs."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx
from torch.export import Dim, export

from tests.passes.models import Tied
from tests.passes.stages import Call, canonical
from tpcompiler.ir.program import reshard, tied
from tpcompiler.ir.text import op_name, value_text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.zeros(2, 3), "f32[2, 3]"),
        (torch.zeros((), dtype=torch.bfloat16), "bf16[]"),
        (torch.zeros(1, dtype=torch.bool), "b8[1]"),
        (torch.zeros(1, dtype=torch.complex64), "torch.complex64[1]"),
        (None, "None"),
        (3, "3"),
        ("a", "'a'"),
    ],
)
def test_values(value: Any, text: str) -> None:
    assert value_text(value) == text


def test_symbolic_sizes() -> None:
    module = Call(lambda self, x: x + 1)
    program = export(module, (torch.randn(3, 4),), dynamic_shapes={"x": {0: Dim("batch", min=2)}})
    (x, *_) = program.graph.nodes
    assert value_text(x.meta["val"]) == f"f32[{x.meta['val'].shape[0]}, 4]"


def test_ops() -> None:
    graph = fx.Graph()
    targets = [torch.ops.aten.add.Tensor, operator.getitem, reshard, torch.ops._c10d_functional.all_reduce.default]
    assert [op_name(graph.call_function(t)) for t in targets] == ["add", "getitem", "reshard", "all_reduce"]


def test_names_of_outputs() -> None:
    module = Call(lambda self, x: {"a": x + 1, "b": [x + 2, (x + 3, None)]})
    assert canonical(module, (torch.randn(2),)).output_names() == ["a", "b.0", "b.1.0", "b.1.1"]
    assert canonical(Call(lambda self, x: x + 1), (torch.randn(2),)).output_names() == ["output"]


def test_tied_leaves() -> None:
    """Two names of one tensor are tied; equal tensors, and parts of one storage, are not."""
    program = canonical(Tied(), (torch.tensor([1, 2]),))
    assert tied(program) == {"p_embed_weight": "p_embed_weight", "p_head_weight": "p_embed_weight"}
    both = torch.randn(2, 3)
    module = Call(lambda self, x: x + self.a + self.b + self.c, a=both[0], b=both[1], c=both[0].clone())
    assert len(set(tied(canonical(module, (torch.randn(3),))).values())) == 3


def test_user_inputs_are_tensors() -> None:
    program = canonical(Call(lambda self, x, flag, y: x + y if flag else x), (torch.randn(2), True, torch.randn(2)))
    assert [node.name for node in program.user_inputs()] == ["x", "y"]
    assert [node.name for node, _ in program.inputs()] == ["x", "flag", "y"]
    assert list(program.mutations()) == []
