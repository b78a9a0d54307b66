"""A few of torch's samples through the whole compiler; `make ops` runs some of every op."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.testing._internal.opinfo.core import SampleInput

from tests.op_db.database import WHOLE, ops_named
from tests.op_db.whole import largest, outcomes
from tpcompiler.rules import registry
from tpcompiler.rules.registry import Entry

OPS = ops_named(WHOLE)


def run(op: Any) -> list[Any]:
    (sample,) = largest(op.sample_inputs("cpu", torch.float32), 1)
    return list(outcomes(op.op, sample))


@pytest.mark.slow
@pytest.mark.parametrize("name", OPS)
def test_every_cut_is_right(name: str) -> None:
    found = run(OPS[name])
    assert {o.what for o in found} <= {"right", "gathered"}, found
    assert any(o.what == "right" for o in found)


@pytest.mark.slow
def test_a_wrong_rule_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    target = torch.ops.aten.softmax.int
    wrong = Entry(lambda node: "{0} -> {0}".format(" ".join("abcd"[: node.meta["val"].ndim])), "any", False)
    monkeypatch.setitem(registry._RULES, target, wrong)
    assert Counter(o.what for o in run(OPS["softmax"]))["wrong"]


@pytest.mark.slow
def test_two_slices_of_one_shape_are_two_operands() -> None:
    """Seen wrong: the local body of a group norm took its bias for its weight."""
    (op,) = ops_named(["nn.functional.group_norm"]).values()
    assert {"0: S(1)": "right"}.items() <= {o.placed: o.what for o in run(op)}.items()


@pytest.mark.slow
def test_sizes_that_depend_on_data_keep_their_names() -> None:
    """Seen crashing: a slice on a shard was given a new name for its size, which nothing else knew."""
    (op,) = ops_named(["tensor_split"]).values()
    sample = SampleInput(torch.randn(5, 5, 4), args=(torch.tensor([1, 3]), 0))
    found = {o.placed: o.what for o in outcomes(op.op, sample)}
    assert found == {"0: S(0)": "gathered", "0: S(1)": "right", "0: S(2)": "right", "1: S(0)": "gathered"}


def test_a_refusal_has_its_text() -> None:
    (op,) = ops_named(["to_sparse"]).values()
    (outcome,) = run(op)
    assert outcome.what == "refused"
    assert "sparse tensor" in outcome.text
