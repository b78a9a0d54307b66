"""A plan that leaves much whole without naming it: one line of the report has what the search would hold."""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AfmoeConfig, AfmoeForCausalLM

import tpcompiler
from tests.runtime.commands import right
from tpcompiler.ask import again
from tpcompiler.parallel import pipeline
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


@pytest.mark.slow
def test_the_line_of_a_config_and_its_command(afmoe: Path, tmp_path: Path) -> None:
    words = ["convert", afmoe / "model.pt2", "--tp", 2, "--plan", afmoe / "config.json", "-o", tmp_path / "out"]
    data = json.loads(right(*words, "--json"))
    whole = sum(row["bytes"] for row in data["tensors"] if row["sharding"] == "R")
    found = data["searched_plan"]
    assert (found["bytes"], found["held_bytes"]) == (data["bytes"], max(data["bytes_per_rank"]))
    assert found["whole_bytes"] == whole > 0.5 * data["bytes"]
    line = line_in(right(*words, "--force"))
    shares = (found[name] / data["bytes"] for name in ("held_bytes", "whole_bytes", "searched_bytes"))
    held, left, searched = (f"{100 * share:.1f}%" for share in shares)
    told, command = line.split(": tpcompiler ")
    assert told == (
        f"a rank holds {held} of all bytes: {left} are whole, and no plan entry names them; "
        f"with --plan auto --optimize memory it would hold {searched}"
    )
    after = json.loads(right(*shlex.split(command), "--json"))
    assert after["out"] == str(tmp_path / "out_auto")
    assert max(after["bytes_per_rank"]) == found["searched_bytes"]
    assert after["searched_plan"] is None


class Layers(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.table = nn.Embedding(40, width)
        self.up, self.down = nn.Linear(width, 2 * width, bias=False), nn.Linear(2 * width, width, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(self.table(ids))))


MLP = {"up": "colwise", "down": "rowwise"}
TABLE, UP = 40 * 64 * 4, 64 * 128 * 4  # bytes


def converted(plan: Mapping[str, Any], width: int = 64, **given: Any) -> tpcompiler.ParallelProgram:
    with weightless() if width > 1000 else contextlib.nullcontext():
        exported = torch.export.export(Layers(width), (torch.zeros(4, 32, dtype=torch.int64),))
    return tpcompiler.parallelize(exported, 2, plan, **given)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "whole"),
    [
        (MLP, None),  # the table is 14% of all bytes
        ({**MLP, "table": "embedding_rowwise"}, None),
        ({"table": "embedding_rowwise"}, 2 * UP),
        ({"table": "embedding_rowwise", "up": "replicate"}, UP),
        ({"table": "embedding_rowwise", "up": "replicate", "down.weight": "R"}, None),
        ({"**": "replicate"}, None),
        ({}, TABLE + 2 * UP),
    ],
)
def test_bytes_that_no_entry_names(plan: dict[str, str], whole: int | None) -> None:
    made = converted(plan)
    found = made.converted.searched_plan()
    assert (None if found is None else found.whole_bytes) == whole
    line = line_in(made.report())
    assert bool(line) == (found is not None)
    if found is not None:
        assert line.endswith(f'plan="auto", optimize="memory" it would hold {found.searched_bytes / found.bytes:.1%}')
        assert max(converted("auto", optimize="memory").parameter_bytes()[1]) == found.searched_bytes


@pytest.mark.slow
def test_a_large_model_takes_the_fastest_plan() -> None:
    """Its layers are worth cutting for speed; a small one's are only for memory."""
    made = converted({"table": "embedding_rowwise"}, width=8192, machine="h100")
    found = made.converted.searched_plan()
    assert found is not None
    assert found.optimize == "latency"
    assert max(converted("auto", width=8192, machine="h100").parameter_bytes()[1]) == found.searched_bytes


def test_an_artifact_on_disk_has_the_same_line(tmp_path: Path) -> None:
    made = converted({"table": "embedding_rowwise"})
    made.save(tmp_path / "out")
    assert line_in(tpcompiler.open(tmp_path / "out").report()) == line_in(made.report()) != ""


@pytest.mark.slow
def test_nothing_is_searched_unless_it_is_asked_and_much_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    searches: list[Any] = []
    search = pipeline.find_placements
    monkeypatch.setattr(pipeline, "find_placements", lambda *given: searches.append(given) or search(*given))
    made, cut = converted({"table": "embedding_rowwise"}), converted(MLP)
    made.manifest()
    assert len(searches) == 2  # the two conversions
    cut.report()
    assert len(searches) == 2
    made.report()
    once = len(searches)
    made.report()
    assert 2 < len(searches) == once


def test_a_search_again_counts_the_optimizer_of_the_artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its state is memory, which a search for a plan that fits depends on."""
    converted({"table": "embedding_rowwise"}, optimizer="sgd").save(tmp_path / "out")
    asked = list[str]()
    convert = again.convert_programs

    def noting(conversions: Any, aim: Any) -> Any:
        asked.append(aim.optimizer)
        return convert(conversions, aim)

    monkeypatch.setattr(again, "convert_programs", noting)
    assert line_in(tpcompiler.open(tmp_path / "out").report())
    assert asked == ["sgd"]
