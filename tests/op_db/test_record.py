"""The recorder shows the calls that `canonicalize` makes of the same op."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tests.op_db.record import functional, record
from tpcompiler._torch import OpOverload
from tpcompiler.ir import edit
from tpcompiler.passes.canonicalize import canonicalize

aten = torch.ops.aten
Forward = Callable[[torch.Tensor], object]


RESHAPES = (aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints, aten.view.default)
COPIES = (aten.clone.default, aten.empty.memory_format)  # an export tells by strides where a reshape copies


def plain(targets: list[OpOverload]) -> list[OpOverload]:
    """With one name for all reshapes: an export takes apart what may alias."""
    return [aten.view.default if t in RESHAPES else t for t in targets if t not in COPIES]


class _Model(torch.nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.run = forward

    def forward(self, x: torch.Tensor) -> object:
        return self.run(x)


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: F.softmax(x @ x.mT, -1),
        lambda x: F.layer_norm(x, [6]),
        lambda x: F.scaled_dot_product_attention(x, x, x),
        lambda x: F.pixel_shuffle(x.view(1, 4, 3, 6), 2),
        lambda x: F.instance_norm(x),
        lambda x: torch.logsumexp(x, (0, 1)),
        lambda x: x.clone().add_(x).flatten(1),
        lambda x: F.huber_loss(x, x + 1),
        lambda x: torch.tensordot(x, x, ([1, 2], [1, 2])),
    ],
)
def test_the_calls_are_those_of_the_canonical_program(forward: Forward) -> None:
    x = torch.randn(4, 3, 6)
    recorded = [
        node.target
        for call in record(lambda: forward(x))
        for node in call.inside.nodes
        if isinstance(node.target, OpOverload)
    ]
    program = canonicalize(torch.export.export(_Model(forward), (x,)))
    compiled = [node.target for node in edit.calls(program.graph) if isinstance(node.target, OpOverload)]
    assert compiled
    assert plain(recorded) == plain(compiled)


def test_values_are_those_before_a_write() -> None:
    x = torch.zeros(3)
    first, write, last = record(lambda: (x + 1, x.add_(2), x + 1))
    assert [call.node.target for call in (first, write, last)] == [aten.add.Tensor] * 3
    values = [edit.operands(call.node)[0].meta["val"] for call in (first, write, last)]
    assert [v[0].item() for v in values] == [0, 0, 2]


def test_a_write_through_a_view_is_not_tracked() -> None:
    """What shares the memory is then another value, and the graph does not say which."""
    x = torch.randn(2, 1, 5)
    (padded,) = record(lambda: aten.pad.default(x, [2, 2], "circular"))
    assert not padded.tracked
    (padded,) = record(lambda: aten.pad.default(x, [2, 2], "constant"))
    assert padded.tracked


def test_a_write_is_tracked_where_only_what_is_written_is_used_later() -> None:
    x = torch.randn(4)
    (call,) = record(lambda: aten.diff.default(x, 0))
    assert call.tracked
    assert [node.target for node in call.inside.nodes][-1] is aten.copy.default


def test_functional_forms() -> None:
    assert functional(aten.transpose_.default) is aten.transpose.int
    assert functional(aten.add_.Tensor) is aten.add.Tensor
    assert functional(aten.add.Tensor) is aten.add.Tensor
    assert functional(aten.add.out) is None
