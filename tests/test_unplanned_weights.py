"""A plan that leaves much whole without naming it: one line of the report has what the search would hold."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AfmoeConfig, AfmoeForCausalLM

import tpcompiler
from tpcompiler.report import again
from tpcompiler.runtime.weightless import weightless

SIZES = {"vocab_size": 120, "hidden_size": 32, "head_dim": 8, "num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_dense_layers": 0}


@pytest.fixture(scope="module")
def afmoe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a config, whose own plan names the experts only, and its exported program."""
    directory = tmp_path_factory.mktemp("afmoe")
    torch.manual_seed(0)
    config = AfmoeConfig(**SIZES, **EXPERTS, num_hidden_layers=1, use_cache=False)
    config.save_pretrained(directory)
    ids = torch.arange(24).view(2, 12)
    exported = torch.export.export(AfmoeForCausalLM(config).eval(), (), {"input_ids": ids})
    torch.export.save(exported, directory / "model.pt2")
    return directory


def line_in(text: str) -> str:
    found = [line for line in text.splitlines() if line.startswith("a rank holds")]
    assert len(found) <= 1
    return found[0] if found else ""


class Layers(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.table = nn.Embedding(40, width)
        self.up, self.down = nn.Linear(width, 2 * width, bias=False), nn.Linear(2 * width, width, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(self.table(ids))))


MLP = {"up": "colwise", "down": "rowwise"}
TABLE = 40 * 64 * 4  # bytes


def converted(plan: Mapping[str, Any], width: int = 64, **given: Any) -> tpcompiler.ParallelProgram:
    with weightless() if width > 1000 else contextlib.nullcontext():
        exported = torch.export.export(Layers(width), (torch.zeros(4, 32, dtype=torch.int64),))
    return tpcompiler.parallelize(exported, 2, plan, **given)


def test_a_search_again_has_the_goal_of_the_artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its limit, and the optimizer whose state counts against it."""
    goal = {"optimizer": "sgd", "memory": 10**8, "optimize": "memory"}
    converted({"table": "embedding_rowwise"}, **goal).save(tmp_path / "out")
    asked = list[dict[str, Any]]()
    convert = again.convert_programs

    def noting(conversions: Any) -> Any:
        asked.extend({name: getattr(own.asked, name) for name in goal} for own in conversions.values())
        return convert(conversions)

    monkeypatch.setattr(again, "convert_programs", noting)
    assert line_in(tpcompiler.open(tmp_path / "out").report())
    assert asked == [goal]
