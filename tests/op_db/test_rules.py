"""The rules of risky ops on torch's sample inputs; `make ops` runs all ops and all samples."""

from __future__ import annotations

import pytest
import torch

from tests.op_db.database import RISKY, calls, ops_named
from tests.op_db.judge import key, verdict, widened
from tests.op_db.record import record
from tests.rules.sample import call, node_of, t
from tpcompiler._torch import OpOverload
from tpcompiler.ir import edit
from tpcompiler.rules import registry
from tpcompiler.rules.registry import Entry

aten = torch.ops.aten
SAMPLES = 3
OPS = ops_named(RISKY)
_judged: set[str] = set()


@pytest.mark.sample(6)
@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", OPS)
def test_no_rule_is_wrong(name: str) -> None:
    found = 0
    for recorded in calls(OPS[name], SAMPLES):
        for node in recorded.inside.nodes:
            if isinstance(node.target, OpOverload):
                found += 1
                if key(node) not in _judged:
                    _judged.add(key(node))
                    what, text = verdict(node)
                    assert what in ("right", "no rule", "no tensor", "draws"), f"{key(node)}: {text}"
    assert found


def test_torch_still_has_the_risky_ops() -> None:
    assert len(OPS) >= 0.95 * len(RISKY)


def test_a_wrong_rule_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    node = node_of(call(aten.softmax.int, t(4, 6), 1, text=""))
    assert verdict(node) == ("right", "")
    monkeypatch.setitem(registry._RULES, aten.softmax.int, Entry(lambda _: "a b -> a b", "any", False))
    what, text = verdict(node)
    assert what == "wrong"
    assert "b cut" in text


def test_a_rule_that_does_not_fit_is_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._RULES, aten.softmax.int, Entry(lambda _: "a -> a", "any", False))
    assert verdict(node_of(call(aten.softmax.int, t(4, 6), 1, text="")))[0] == "crash"


def test_shards_that_the_op_does_not_take_are_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._RULES, aten.layer_norm.default, Entry(lambda _: "a b -> a b", "any", False))
    assert verdict(node_of(call(aten.layer_norm.default, t(4, 6), [6], text="")))[0] == "crash"


def test_random_ops_are_not_judged() -> None:
    (drawn,) = record(lambda: torch.bernoulli(torch.rand(3)))[1:]
    assert verdict(drawn.node) == ("draws", "")


def test_a_call_is_judged_in_float64() -> None:
    node = widened(node_of(call(aten.to.dtype, t(3).float(), torch.float32, text="")))
    assert edit.operands(node)[0].meta["val"].dtype == node.meta["val"].dtype == torch.float64
