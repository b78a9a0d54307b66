"""Claims as files have them: one of another form is refused, with the path of what is wrong."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx

from tpcompiler.errors import ArtifactError
from tpcompiler.ir.node_placement import CLAIM, Claim, claim_data, read_claim

SOUND: dict[str, Any] = {
    "origin": "relu",
    "sharding": ["R"],
    "reason": "it is so",
    "call": {"op": "aten::relu", "args": [{"node": "x"}], "kwargs": {}},
    "reshard": "reshard_1",
}


def claiming(claim: object) -> fx.Node:
    node = fx.Graph().call_function(torch.relu)
    node.meta["custom"] = {CLAIM: claim}
    return node


def test_a_claim() -> None:
    assert claim_data(read_claim(claiming(SOUND))) == SOUND
    node = fx.Graph().call_function(torch.relu)
    assert read_claim(node) == Claim()


@pytest.mark.parametrize("name", [*SOUND, "parts", "more"])
@pytest.mark.parametrize("value", [1.5, [1], [["R"]], [{"a": 1}], [-1]], ids=repr)
def test_what_is_not_in_its_form(name: str, value: Any) -> None:
    with pytest.raises(ArtifactError, match=rf"^'relu' has a claim that is damaged( at \$.{name}|: .* `?{name})"):
        read_claim(claiming({**SOUND, name: value}))


@pytest.mark.parametrize("claim", [1, "R", ["R"], {1: 2}])
def test_what_is_no_claim(claim: object) -> None:
    node = claiming(claim)
    with pytest.raises(ArtifactError, match=r"^'relu' has a claim that is damaged"):
        read_claim(node)


def test_a_part_is_in_its_form_too() -> None:
    source = claiming({**SOUND, "parts": {"0": {"reason": "here"}, "1": {}}})
    parts = [source.graph.call_function(operator.getitem, (source, index)) for index in range(3)]
    assert [read_claim(part) for part in parts[:2]] == [Claim(reason="here"), Claim()]
    parts[2].meta["custom"] = source.meta["custom"]  # as torch writes it
    assert read_claim(parts[2]).origin == "relu"
    source.meta["custom"][CLAIM]["parts"]["0"] = {"origin": 1}
    with pytest.raises(ArtifactError, match=r"damaged at \$.parts\[...\].origin: expected str \| null, got int\n"):
        read_claim(parts[0])
