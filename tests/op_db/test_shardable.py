"""What can be cut, by execution; what the rules keep; and the list of both."""

from __future__ import annotations

import pytest
import torch

from tests.op_db.database import RISKY, calls, ops_named
from tests.op_db.page import read_lines
from tests.op_db.record import Call, record
from tests.op_db.shardable import cuts, declined, sound
from tests.opaque import opaque

aten = torch.ops.aten
OPS = ops_named(RISKY)


def call_of(target: object, *args: object) -> Call:
    (call,) = record(lambda: target(*args))  # type: ignore[operator]
    return call


def lines(call: Call) -> dict[str, str]:
    """line -> why the rules decline it, of the cuts that are sound."""
    found = sound(call.node)
    assert found is not None
    return {cut.line.removeprefix("aten."): declined(call, cut) for cut in sorted(found)}


def test_a_softmax() -> None:
    x = torch.randn(4, 6, dtype=torch.float64)
    assert lines(call_of(aten.softmax.int, x, 1)) == {"softmax.int self -2": ""}
    assert lines(call_of(aten.softmax.int, x, 0)) == {"softmax.int self -1": ""}


def test_a_sum_and_what_broadcasts() -> None:
    a, b, c = (torch.randn(*s, dtype=torch.float64) for s in ((5,), (4, 6), (6, 5)))
    found = lines(call_of(aten.addmm.default, a, b, c))
    assert found == {f"addmm.default {name}": "" for name in ("self -1", "mat1 -1", "mat1 -2", "mat2 -1", "mat2 -2")}


def test_a_scan_cannot_be_cut_along_its_dim() -> None:
    x = torch.randn(4, 6, dtype=torch.float64)
    assert list(lines(call_of(aten.cumsum.default, x, 0))) == ["cumsum.default self -1"]


def test_a_cut_is_followed_through_what_an_op_becomes() -> None:
    """Pixel shuffle becomes views and a permutation: what lies inside of a merged dim is kept in blocks."""
    x = torch.randn(3, 4, 2, 2, dtype=torch.float64)
    call = call_of(aten.pixel_shuffle.default, x, 2)
    assert len([node for node in call.inside.nodes if node.op == "call_function"]) > 1
    why = {cut.dim: declined(call, cut) for cut in cuts(call.node)}
    assert why == dict.fromkeys(range(4), "")


def test_an_op_without_a_rule_says_so() -> None:
    x = torch.randn(4, 4, dtype=torch.float64)
    call = call_of(opaque._opoverload, x)
    assert {declined(call, cut) for cut in cuts(call.node)} == {"no rule: tests.opaque.default"}


@pytest.mark.sample(36)
@pytest.mark.parametrize("name", OPS)
def test_the_list_is_true(name: str) -> None:
    """Of every line here, the rules keep the cut in all samples if it is listed as offered."""
    listed = read_lines()
    for call in calls(OPS[name], 8):
        for cut in cuts(call.node):
            if listed.get(cut.line) == "offered":
                assert declined(call, cut) == ""
