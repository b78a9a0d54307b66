"""Claims as files have them: what is not in its form is as if it were not claimed."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx

from tpcompiler.ir.claims import CLAIM, read_claim

SOUND = {
    "origin": "relu",
    "sharding": ["R"],
    "reason": "it is so",
    "call": {"op": "aten::relu"},
    "reshard": "reshard_1",
}


def claiming(claim: object) -> fx.Node:
    node = fx.Graph().call_function(torch.relu)
    node.meta["custom"] = {CLAIM: claim}
    return node


def test_a_claim() -> None:
    assert read_claim(claiming(SOUND)) == SOUND
    assert read_claim(claiming({**SOUND, "more": 1})) == SOUND


@pytest.mark.parametrize("name", SOUND)
@pytest.mark.parametrize("value", [1.5, None, [1], [["R"]], [{"a": 1}], [-1]], ids=repr)
def test_what_is_not_in_its_form(name: str, value: Any) -> None:
    assert read_claim(claiming({**SOUND, name: value})) == {k: v for k, v in SOUND.items() if k != name}


@pytest.mark.parametrize("claim", [None, 1, "R", ["R"], {1: 2}])
def test_what_is_no_claim(claim: object) -> None:
    node = claiming(claim)
    assert read_claim(node) == {}
    node.meta["custom"] = claim
    assert read_claim(node) == {}


def test_a_part_is_in_its_form_too() -> None:
    source = claiming({**SOUND, "parts": {"0": {"origin": 1, "reason": "here"}, "1": []}})
    parts = [source.graph.call_function(operator.getitem, (source, index)) for index in range(3)]
    assert [read_claim(part) for part in parts[:2]] == [{"reason": "here"}, {}]
    parts[2].meta["custom"] = source.meta["custom"]  # as torch writes it
    assert read_claim(parts[2])["origin"] == "relu"
