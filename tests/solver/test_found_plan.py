"""A plan that the search found gives the very program that was found, and one for some layers holds for these."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import ExportedProgram, export

import tpcompiler
from tests.zoo.found import from_file, written
from tests.zoo.index import CASES
from tpcompiler import Plan
from tpcompiler.errors import PlanError

MACHINE = "ideal"  # as if latencies were none: small models are worth cutting


@cache
def exported(name: str) -> ExportedProgram:
    return CASES[name].export(False)


# of searches that leave out choices: one that a form would cost its gain, one whose notes would compare with a worse one
TRUNCATED = [("squeezebert", 4), ("mixtral", 4)]
REFUSED_FORM = ("qwen2_moe", 2)  # the plan that was found rules out a form, so that no note may report it as refused
# A decoder, also with fewer heads of keys than ranks, a packed matrix, an encoder-decoder whose halves share a table,
# weights that a module holds several of, convolutions, an op in simpler ones, a bias beside a whole
# weight, experts.
SOME = [
    ("llama", {"dp": 2, "tp": 2}),
    ("llama", 8),
    ("gpt2", 2),
    ("t5", 4),
    ("einsum_transformer", 4),
    ("resnet", 2),
    ("sam_vision", 4),
]


@pytest.mark.slow
@pytest.mark.sweep(4)
@pytest.mark.parametrize(("name", "mesh"), [*SOME, ("qwen3_moe", 4), *TRUNCATED, REFUSED_FORM], ids=str)
def test_the_same_program(name: str, mesh: Any, tmp_path: Path) -> None:
    program = exported(name)
    auto = tpcompiler.parallelize(program, mesh, "auto")
    assert written(from_file(program, mesh, tmp_path)) == written(auto)


class Mlp(nn.Module):
    """Of two layers, and a bottleneck that nobody would cut for its speed."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
        self.narrow, self.wide = nn.Linear(64, 8, bias=False), nn.Linear(8, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(torch.relu(self.up(x)))
        return self.wide(torch.relu(self.narrow(y)))


@cache
def mlp() -> ExportedProgram:
    torch.manual_seed(0)
    return export(Mlp(), (torch.randn(512, 64),))


@pytest.mark.slow
def test_what_is_pinned_holds_and_the_rest_follows() -> None:
    found = tpcompiler.find_plan(mlp(), 2, {"u*": "rowwise"})
    assert found.to_data() == {
        "u*": "rowwise",
        "down": "rowwise",
        "narrow": "replicate",
        "wide": "replicate",
        "**": "auto",
    }
    made = tpcompiler.parallelize(mlp(), 2, {"up": "rowwise", "**": "auto"})
    by_name = {row.name: row.sharding for row in made.manifest().tensors}
    assert by_name["up.weight"] == "S(1)"
    assert made.verify((torch.randn(512, 64),)).ok


def test_layers_that_differ_are_named_apart() -> None:
    """A pattern stands for no name that it is not meant for: not for what lies between, nor for what is pinned."""
    names = ["a.0", "a.1", "a.2", "a.norm", "b.0.up", "b.1.up", "b.2.up"]
    found = {"a.0": "colwise", "a.1": "colwise", "a.2": "colwise", "b.1.up": "rowwise", "b.2.up": "rowwise"}
    assert Plan.of({"b.0.up": "replicate"}).completed(found, names).to_data() == {
        "b.0.up": "replicate",
        "a.0": "colwise",
        "a.1": "colwise",
        "a.2": "colwise",
        "b.*.up": "rowwise",
        "**": "auto",
    }
    assert Plan.of({"**.up": "replicate"}).completed({"b.1.up": "rowwise"}, names).to_data() == {
        "**.up": "replicate",
        "**": "auto",
    }


def test_auto_is_for_all_that_is_not_named() -> None:
    with pytest.raises(PlanError, match=r"'up' is 'auto', which is for '\*\*' alone") as error:
        Plan.of({"up": "auto"})
    assert error.value.facts["asked by"] == 'the plan ("up": "auto")'
